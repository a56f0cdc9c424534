"""Kubernetes' image service, passed on to containerd: for the credentials that the kubelet sends with a pull.

Knows the API's bytes and how to hand credentials to the fetch process; decides nothing about images.
"""

from snapshotter.cri.proxy import ImageServiceProxy
from snapshotter.cri.pulls import Pulls

__all__ = ["ImageServiceProxy", "Pulls"]
