"""Room `train`: the training recipe behind `onefold train`.

    config ─► early ─► launch (no RANK: starts the ranks) ─► rank ─► worker ─► prepare ─► loop
      options, checked        one run in a folder (output.py)           one rank     model, data, choose,
      without torch                                                                  onefold.shard, optimizers

    a step      loop: runs the steps   step: the parts of one   faults: where numbers went bad   memory_error: out of memory
    one machine  alone: torchrun's rendezvous there, on loopback
    options     config: the options   config_file: their file
    resuming    checkpoints: resumes from one   keeper: writes them
    output      output: the folder and its files   results: the model   report: what the user sees, what `onefold report` reads

The rooms `models` and `data` load what `--model` and `--data` name. Signals, ranks and the claim on
a folder are in `processes`.

`import onefold` imports nothing from here: this room needs the extra `onefold[train]`.
"""
