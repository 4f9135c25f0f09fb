"""The `composer` launcher: one process for each accelerator of this node, as ranks of one run.

- `main`: the command. `args`: its command line.
- `topology`, `cluster`: ranks of this node, and each rank's command and environment.
- `preflight`: checks for errors that can be found before any process starts.
- `workers`: the processes of one attempt, and signals. `run`: attempts, restarts and the exit status.
- `output`, `failures`: the output of the ranks, and the report of a failed run.
- `console`: the launcher's own stdout and stderr.
- `guardian`: a helper process that ends the ranks if the launcher is killed.
- `hook`: startup code of each rank's interpreter, which records its exception.

`torch.distributed.elastic` starts, monitors and signals the processes. It is imported only to start some, so
`composer --help` responds at once.
"""
