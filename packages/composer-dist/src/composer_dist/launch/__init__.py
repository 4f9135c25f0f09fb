"""The `composer` launcher: one process for each accelerator of this node, as ranks of one run.

- `main`: the command, and checks before any process starts. `args`: its command line.
- `topology`: ranks of this node, and each rank's command and environment.
- `workers`: the processes of one attempt, and signals. `run`: attempts, restarts and the exit status.
- `output`: the output of the ranks. `report`: the launcher's own output, and the report of a failed run.
- `guardian`: a helper process that ends the ranks if the launcher is killed.
- `hook`: startup code of each rank's interpreter, which records its exception.

`torch.distributed.elastic` starts, monitors and signals the processes. It is imported only to start some, so
`composer --help` responds at once.
"""
