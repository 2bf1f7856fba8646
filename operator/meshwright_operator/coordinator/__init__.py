"""The coordinator: tells worker agents the mesh generation and hears from them how training stands."""
