{{- define "meshwright.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end -}}
{{- end }}

{{- define "meshwright.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "meshwright.labels" -}}
{{ include "meshwright.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "meshwright.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "meshwright.name" .) }}
{{- end }}

{{- define "meshwright.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end }}

{{- define "meshwright.keySecret" -}}
{{ .Values.coordinator.key.existingSecret | default (printf "%s-coordinator-key" (include "meshwright.name" .)) }}
{{- end }}

{{/* What the operator does with jobs and their children, and nothing else. It writes token secrets and reads none. */}}
{{- define "meshwright.namespacedRules" -}}
- apiGroups: [meshwright.dev]
  resources: [paralleltrainingjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [meshwright.dev]
  resources: [paralleltrainingjobs/status]
  verbs: [patch]
- apiGroups: [meshwright.dev]
  resources: [paralleltrainingjobs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, secrets]
  verbs: [create, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end }}
