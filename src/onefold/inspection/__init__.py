"""Room `inspection`: the commands of `onefold checkpoint`. They need no ranks and no model.

summary   list the contents    verify   check every byte    diff   compare two checkpoints
"""
