"""One machine without Kubernetes: the planner's actions carried out with processes and files."""
