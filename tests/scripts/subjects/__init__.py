"""The habits by subject, in the order of the page."""

#: module: what the page calls it.
SUBJECTS = {
    "groups": "Parameter groups",
    "optimizers": "Optimizers and schedules",
    "clipping": "Clipping and norms",
    "scaling": "Mixed precision",
    "gradients": "Gradients by hand",
    "weights": "Weights by hand",
    "initialization": "Initialization after `shard()`",
    "reports": "Counts and reports",
    "losses": "Parameters outside the forward pass",
    "differentiation": "Autograd",
    "saving": "Saving and loading",
    "buffers": "Buffers",
    "dtypes": "Dtypes",
    "structure": "Structure",
    "evaluation": "Evaluation",
    "kinds": "Kinds of models",
    "autograd": "Gradients of a script's own",
    "loops": "Loops of every kind",
    "taken": "Weights that others take",
    "ranks_by_hand": "Ranks by hand",
}
