"""Room `doctor`: what `onefold doctor` does. The command itself (arguments and tables) is in `cli`.

| command       | question                               | files, in the order to read them                          |
|---------------|----------------------------------------|-----------------------------------------------------------|
| doctor        | What does this machine have?           | `facts`                                                   |
| --check       | Does Onefold compute correctly on it?  | `checks`, `coordinator`; then `check_numbers`,            |
|               |                                        | `check_steps`, `check_device`, `lost_peer`                |
| --calibrate   | How fast is it?                        | `calibrate`, `ranks`, `measure`; then `bench`,            |
|               |                                        | `benchmark_blocks`, `moves`, `disk`, `reference_steps`    |

`ranks` starts and ends the processes of all of them. What --calibrate measured is kept by `machine`.
"""
