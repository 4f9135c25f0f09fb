"""How a model is sharded over devices: FSDP2, hybrid sharding and tensor parallelism."""
