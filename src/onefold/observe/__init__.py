"""Room `observe`: measurements from the ledgers, in the schema of `plan`; figures of each step,
recorded steps, the report.

| to get                                  | use                                                     |
|-----------------------------------------|---------------------------------------------------------|
| figures of each step                    | `meter.Meter`, `meter.flat`                             |
| the bytes that autograd keeps           | `activations.Activations`                               |
| a recording of some steps               | `trace.record`                                          |
| an account to compare with the plan     | `trace.measured`                                        |
| the files of a run, and the report      | `runfile.write_observed`, `report.write_report`         |
"""
