"""The `composer` launcher: one process for each accelerator of this node, as ranks of one run.

- `args`: the command line. `topology`, `cluster`: which ranks this node runs, and how that was found out.
- `children`: each rank's command and environment. `preflight`: what can be known to fail before anything starts.
- `workers`: the processes of one attempt. `run`, `elastic`: how an attempt ends, and whether another follows.
- `logs`, `report`: where the ranks' output goes, and what is said when one of them fails.
- `signals`, `console`: what may come at any moment, and what may be gone at any moment.
- `guardian`: nothing is left running, also when the launcher is killed.
- `hook`: what each rank's interpreter runs before the script, so that its exception is recorded.
- `main`: the command.

Starting, watching and signalling the processes and copying their output is the work of `torch.distributed.elastic`,
which is loaded when there is something to start: the answer to `composer --help` does not wait for it.
"""
