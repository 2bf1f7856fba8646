"""A Kubernetes API server in Python, complete enough that operators, kubectl and client libraries take it for one.

It is only the API server: it stores, checks, defaults, merges and streams objects. Scheduling, garbage collection,
namespace deletion and running pods are done by clients of its HTTP API, so the same clients also complete a bare
kube-apiserver.
"""
