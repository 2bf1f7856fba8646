"""The controllers of kube-controller-manager that a training job needs."""
