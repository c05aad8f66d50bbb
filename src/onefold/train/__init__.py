"""Room `train`: the training recipe behind `onefold train`.

    config ─► early ─► launch (no RANK: agent.py starts the ranks) ─► worker ─► prepare ─► loop
      what is asked for,      one run in a folder (output.py),          one rank     models, data, choose,
      refused before torch    signals (process.py)                                   onefold.shard

    model       models: --model to a module   folders: Hugging Face's, and the hub   adapters: --lora   optimizers: --optimizer
    data        sources, tables: documents   text: tokens   token_cache: on the disk   data, rows: samples   order: which, when
    survival    process: who asks to end   ranks: who has gone   checkpoints: saving and going on   faults: what a step may meet
    output      output: the folder, its lock and files   report: what the user sees, what `onefold report` reads

Nothing here is imported by `import onefold`: this room needs the extra `onefold[train]`.
"""
