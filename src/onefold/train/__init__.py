"""Room `train`: the training recipe behind `onefold train`.

    config ─► early ─► launch (no RANK: agent.py starts the ranks) ─► worker ─► prepare ─► loop
      what is asked for,      one run in a folder (output.py),          one rank     models, data, choose,
      refused before torch    signals (process.py)                                   onefold.shard

    model       models: --model to a module   folders: Hugging Face's, and the hub   adapters: --lora   optimizers: --optimizer
    data        sources, tables: documents   text, tokenizers, token_cache: tokens   data, rows: samples   order, shuffle: which, when
    a step      loop: one after another   step: what it is made of   faults: what it may meet   memory_error: none left
    asked       config: the options   config_file: their file   errors: what a user reads instead of a traceback
    survival    process: who asks to end   ranks: who has gone   checkpoints: going on from one   keeper: writing them
    output      output: the folder, its lock and files   results: model and sample   report: what the user sees, what `onefold report` reads

Nothing here is imported by `import onefold`: this room needs the extra `onefold[train]`.
"""
