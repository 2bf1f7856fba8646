"""What kube-controller-manager does and a training job needs: garbage, namespaces, claims, nodes."""
