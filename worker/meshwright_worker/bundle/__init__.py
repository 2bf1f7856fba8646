"""The self-contained agent of `runtime.agent: Injected`: assembled at build time, copied into pods at their start."""
