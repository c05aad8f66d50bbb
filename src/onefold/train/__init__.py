"""Room `train`: the training recipe behind `onefold train`.

    config ─► launch (no RANK: starts torchrun) ─► worker ─► models, data ─► choose ─► onefold.shard ─► loop ─► export

Nothing here is imported by `import onefold`: this room needs the extra `onefold[train]`.
"""
