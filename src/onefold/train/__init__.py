"""Room `train`: the training recipe behind `onefold train`.

    config ─► early ─► launch (no RANK: agent.py starts the ranks) ─► worker ─► prepare ─► loop
      what is asked for,      one run in a folder (output.py)           one rank     model, data, choose,
      refused before torch                                                           onefold.shard, optimizers

    a step      loop: one after another   step: what it is made of   faults: what it may meet   memory_error: none left
    asked       config: the options   config_file: their file
    survival    checkpoints: going on from one   keeper: writing them
    output      output: the folder and its files   results: model and sample   report: what the user sees, what `onefold report` reads

What `--model` and `--data` name is made in the rooms `models` and `data`; signals, ranks and the
claim on a folder are in `processes`.

Nothing here is imported by `import onefold`: this room needs the extra `onefold[train]`.
"""
