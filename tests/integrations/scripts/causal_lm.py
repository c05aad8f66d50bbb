"""Fine-tunes a causal language model on a text or JSON file, as transformers' guide to language
modeling builds it: dataclasses of arguments, `load_dataset`, blocks of equal length, Trainer.

torchrun --nproc-per-node 2 causal_lm.py --model_name_or_path M --train_file T --output_dir O
"""

import math
from dataclasses import dataclass, field
from itertools import chain

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "folder or name of the model"})


@dataclass
class DataArguments:
    train_file: str = field(metadata={"help": "a .txt or .json file"})
    validation_file: str | None = None
    block_size: int = 64


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    files = {"train": data_args.train_file}
    if data_args.validation_file is not None:
        files["validation"] = data_args.validation_file
    extension = data_args.train_file.rsplit(".", 1)[-1]
    raw = load_dataset("text" if extension == "txt" else extension, data_files=files)

    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))

    columns = raw["train"].column_names
    text = "text" if "text" in columns else columns[0]
    size = data_args.block_size

    def group_texts(examples):
        """All texts behind each other, in blocks; what is left over is dropped."""
        joined = {name: list(chain(*rows)) for name, rows in examples.items()}
        whole = len(joined["input_ids"]) // size * size
        blocks = {
            name: [row[i : i + size] for i in range(0, whole, size)] for name, row in joined.items()
        }
        blocks["labels"] = [list(block) for block in blocks["input_ids"]]
        return blocks

    with training_args.main_process_first(desc="texts into blocks"):
        tokenized = raw.map(
            lambda rows: tokenizer(rows[text]), batched=True, remove_columns=columns
        )
        blocks = tokenized.map(group_texts, batched=True)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=blocks["train"] if training_args.do_train else None,
        eval_dataset=blocks["validation"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
