"""Room `train`: the training recipe behind `onefold train`.

    config ─► early ─► launch (no RANK: starts the ranks) ─► rank ─► worker ─► prepare ─► loop
      options, checked        one run in a folder (output.py)           one rank     model, data, choose,
      without torch                                                                  onefold.shard, optimizers

    a step      loop: runs the steps   step: the parts of one
    one machine  alone: torchrun's rendezvous there, on loopback
    resuming    checkpoints: writes them and resumes from one
    output      output: the folder and its files   report: what the user sees, what `onefold report` reads

The rooms `models` and `data` load what `--model` and `--data` name. Signals, ranks and the claim on
a folder are in `processes`.

`import onefold` imports nothing from here: this room needs the extra `onefold[train]`.
"""
