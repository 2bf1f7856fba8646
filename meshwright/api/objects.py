"""Kubernetes objects as the API server sends and stores them."""

from __future__ import annotations

from typing import Any

KubeObject = dict[str, Any]
"""One object as JSON: `apiVersion`, `kind`, `metadata`, and what its kind adds."""
