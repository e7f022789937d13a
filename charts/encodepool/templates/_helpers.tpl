{{- define "encodepool.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $base := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- printf "%s-operator" ($base | trunc 46 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "encodepool.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "encodepool.labels" -}}
{{ include "encodepool.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "encodepool.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "encodepool.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Reference of an image: (dict "image" .Values.image "root" .) */}}
{{- define "encodepool.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Namespaces that are watched, as a JSON list; empty for all of the cluster. */}}
{{- define "encodepool.namespaces" -}}
{{- if eq .Values.scope "namespace" -}}
{{- default (list .Release.Namespace) .Values.watchNamespaces | toJson -}}
{{- else -}}
[]
{{- end -}}
{{- end -}}

{{/* "true" if the chart brings the CRD. */}}
{{- define "encodepool.installsCrd" -}}
{{- $wanted := toString .Values.crds.install -}}
{{- if eq $wanted "auto" -}}
{{- eq .Values.scope "cluster" -}}
{{- else -}}
{{- $wanted -}}
{{- end -}}
{{- end -}}

{{/* What the schema cannot say in a sentence of its own. */}}
{{- define "encodepool.check" -}}
{{- if and (eq .Values.scope "cluster") .Values.watchNamespaces -}}
{{- fail "watchNamespaces is for scope: namespace; with scope: cluster all namespaces are watched. Set scope: namespace or leave watchNamespaces empty." -}}
{{- end -}}
{{- if and (not .Values.serviceAccount.create) .Values.rbac.create (not .Values.serviceAccount.name) -}}
{{- fail "serviceAccount.create is false: set serviceAccount.name, else the operator's rights would go to the account \"default\" and so to every pod of the namespace." -}}
{{- end -}}
{{- end -}}
