"""Room `train`: the training recipe behind `onefold train`.

    config ─► launch (no RANK: starts torchrun) ─► worker ─► resume ─► models, data ─► choose ─► onefold.shard ─► loop ─► export
                                                    │                                                              │
                          stop, neighbours: who asks to end, who has gone          survive, nonfinite, slow: what a step may meet

Nothing here is imported by `import onefold`: this room needs the extra `onefold[train]`.
"""
