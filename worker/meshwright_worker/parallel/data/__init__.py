"""Data parallelism: DDP, ZeRO, FSDP and compressed gradients."""
