{{/* What the operator does in each namespace that it watches. A server-side apply of an object that is
not there needs create beside patch. */}}
{{- define "encodepool.rules" -}}
- apiGroups: [encodepool.dev]
  resources: [encodepools]
  verbs: [get, list, watch]
- apiGroups: [encodepool.dev]
  resources: [encodepools/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch, delete]
- apiGroups: [apps]
  resources: [statefulsets, controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
# Never deleted by the operator: it goes with its pool.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end -}}

{{/* What it needs of the cluster, in cluster scope only. */}}
{{- define "encodepool.clusterRules" -}}
# Whether the served schema is as new as the operator's.
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  resourceNames: [encodepools.encodepool.dev]
  verbs: [get]
{{- end -}}

{{/* The Lease by which replicas agree; a name cannot be given to create. */}}
{{- define "encodepool.leaseRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "encodepool.fullname" . }}]
  verbs: [get, update]
{{- end -}}

{{- define "encodepool.subjects" -}}
- kind: ServiceAccount
  name: {{ include "encodepool.serviceAccountName" . }}
  namespace: {{ .Release.Namespace }}
{{- end -}}
