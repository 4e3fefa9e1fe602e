{{- define "tidemill.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "tidemill.autoscaler.labels" -}}
control-plane: controller-manager
app.kubernetes.io/name: workload-variant-autoscaler
{{- end }}

{{- define "tidemill.picker.labels" -}}
app.kubernetes.io/name: endpoint-picker
{{- end }}

{{- define "tidemill.picker.namespace" -}}
{{ .Values.picker.namespace | default .Release.Namespace }}
{{- end }}

{{- /* What no namespace holds. */ -}}
{{- define "tidemill.rules.cluster" -}}
- apiGroups: [""]
  resources: [nodes, namespaces]
  verbs: [list, watch]
# The external metrics API asks the API server who somebody is and what they may do.
- apiGroups: [authentication.k8s.io]
  resources: [tokenreviews]
  verbs: [create]
- apiGroups: [authorization.k8s.io]
  resources: [subjectaccessreviews]
  verbs: [create]
{{- end }}

{{- /* What it reads in the namespaces that it looks after, and the little that it writes. */ -}}
{{- define "tidemill.rules.namespaced" -}}
- apiGroups: [""]
  resources: [pods, configmaps]
  verbs: [list, watch]
- apiGroups: [apps]
  resources: [deployments, replicasets, statefulsets]
  verbs: [list, watch]
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [list, watch]
- apiGroups: [llmd.ai]
  resources: [variantautoscalings]
  verbs: [list, watch]
- apiGroups: [llmd.ai]
  resources: [variantautoscalings/status]
  verbs: [patch]
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [list, watch]
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [list, watch]
- apiGroups: [inference.networking.k8s.io, inference.networking.x-k8s.io]
  resources: [inferencepools]
  verbs: [list, watch]
- apiGroups: [resource.k8s.io]
  resources: [resourceclaims]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
# Replicas: with --actuation scale, and to wake a model from 0, which no HPA does.
- apiGroups: [apps]
  resources: [deployments/scale]
  verbs: [patch]
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets/scale]
  verbs: [patch]
{{- end }}
