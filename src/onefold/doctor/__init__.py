"""Room `doctor`: what `onefold doctor` does. The command itself (arguments and tables) is in `cli`.

| command       | question                               | files, in the order to read them                          |
|---------------|----------------------------------------|-----------------------------------------------------------|
| doctor        | What does this machine have?           | `facts`                                                   |
| --check       | Does Onefold compute correctly on it?  | `checks`; then `model`, `numbers`, `steps`                |
| --calibrate   | How fast is it?                        | `calibrate`, `measure`                                    |

`ranks` starts and ends the processes of all of them. What --calibrate measured is kept by `machine`.
"""
