"""One way to declare a Prometheus metric; exporters, documentation pages and checks follow from the declarations."""
