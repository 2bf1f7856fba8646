"""A Kubernetes API server in Python, complete enough for operators, kubectl and client libraries.

It stores, validates, defaults, merges and streams objects. Scheduling, garbage collection, namespace deletion and
running pods are done by clients of its HTTP API, so the same clients also work with a bare kube-apiserver.
"""
