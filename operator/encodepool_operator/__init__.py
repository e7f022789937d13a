"""The EncodePool operator: one planner, carried out on this machine or on a Kubernetes cluster."""
