"""The Kubernetes API: client, cache of watched objects, and the Lease. Knows nothing about pools."""
