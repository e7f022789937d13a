{{- /* Commands stand at the left edge: the end of a here-document counts only there. */ -}}
{{- define "encodepool.notes" -}}
{{- $namespaces := include "encodepool.namespaces" . | fromJsonArray -}}
{{- $namespace := first (append $namespaces "default") -}}
The encodepool operator {{ .Chart.AppVersion }} watches {{ join ", " $namespaces | default "all namespaces" }}.
{{- if ne (include "encodepool.installsCrd" .) "true" }}

This release does not bring the CRD. The operator waits until it is there; who may write to the whole
cluster installs it once, from the folder crds/ of the sources:

kubectl apply --server-side -f crds/
{{- end }}

1. Wait for the operator:

kubectl --namespace {{ .Release.Namespace }} rollout status deployment/{{ include "encodepool.fullname" . }}

2. Make a pool. Each group of this one is an encode server with one GPU:

kubectl apply -f - <<END
apiVersion: encodepool.dev/v1alpha1
kind: EncodePool
metadata:
  name: qwen3-vl
  namespace: {{ $namespace }}
spec:
  replicas: 2
  {{- if not .Values.workerImage.repository }}
  image: encodepool/worker:{{ .Chart.AppVersion }}
  {{- end }}
  model: {name: Qwen/Qwen3-VL-8B-Instruct}
  accelerator: {perRank: 1}
  transfer: {backend: mooncake, protocol: tcp}
END

3. Watch it come up. While it is not available, its conditions and Events say why:

kubectl --namespace {{ $namespace }} wait --for=condition=Available --timeout=30m encodepool/qwen3-vl
kubectl --namespace {{ $namespace }} describe encodepool qwen3-vl

4. Point the gateway at it. The list of encode servers, and the flags that make SMG follow it:

kubectl --namespace {{ $namespace }} get configmap qwen3-vl-endpoints -o yaml
kubectl --namespace {{ $namespace }} get encodepool qwen3-vl -o jsonpath='{.status.consumer.smg}'
{{- if and (eq (include "encodepool.installsCrd" .) "true") .Values.crds.keep }}

Uninstalling this release leaves the CRD and all pools; without an operator they are not looked after.
{{- end }}
{{- end -}}
