{{/* A Service's name has at most 63 characters, and a release's name may have 53. */}}
{{- define "meshwright.name" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) -}}
{{ $name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "meshwright.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "meshwright.labels" -}}
{{ include "meshwright.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Labels of objects that a Prometheus selects by the labels of the values. */}}
{{- define "meshwright.monitoringLabels" -}}
{{ include "meshwright.labels" . }}
{{- with .Values.monitoring.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "meshwright.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "meshwright.name" .) }}
{{- end }}

{{- define "meshwright.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end }}

{{/* The image of injected agents; empty if there is none. */}}
{{- define "meshwright.agentImage" -}}
{{- with .Values.agentImage -}}
{{- if .repository -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "meshwright.coordinatorUrl" -}}
{{- $scheme := ternary "http" "https" (eq .Values.coordinator.tls.mode "disabled") -}}
{{- $service := printf "%s://%s.%s.svc:%v" $scheme (include "meshwright.name" .) .Release.Namespace .Values.coordinator.port -}}
{{ .Values.coordinator.url | default $service }}
{{- end }}

{{/* The names of the chart's Service, and those that the values add. */}}
{{- define "meshwright.coordinatorNames" -}}
{{- $service := printf "%s.%s" (include "meshwright.name" .) .Release.Namespace -}}
{{- $own := list (printf "%s.svc" $service) $service (printf "%s.svc.%s" $service .Values.coordinator.tls.clusterDomain) -}}
{{ toYaml (uniq (concat $own .Values.coordinator.tls.names)) }}
{{- end }}

{{/* The kubernetes.io/tls Secret with the serving certificate; empty if the operator issues it. */}}
{{- define "meshwright.tlsSecret" -}}
{{- with .Values.coordinator.tls -}}
{{- if eq .mode "secret" -}}
{{ required "coordinator.tls.secretName is required if coordinator.tls.mode is secret" .secretName }}
{{- else if eq .mode "certManager" -}}
{{ printf "%s-coordinator-tls" (include "meshwright.name" $) }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* What the operator reads of the cluster. */}}
{{- define "meshwright.clusterRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
# Placement counts the GPUs that pods of other owners hold, in whatever namespace they are.
- apiGroups: [""]
  resources: [pods]
  verbs: [list]
# Devices behind Dynamic Resource Allocation, and which of them claims have.
- apiGroups: [resource.k8s.io]
  resources: [resourceslices, deviceclasses, resourceclaims]
  verbs: [list, watch]
{{- end }}

{{/* Leadership. A create cannot be limited to a name. */}}
{{- define "meshwright.leaseRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "meshwright.name" . }}]
  verbs: [get, update]
{{- end }}

{{/* The operator's own Secret, the only one that it reads. A create cannot be limited to a name. */}}
{{- define "meshwright.credentialsRules" -}}
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [{{ include "meshwright.name" . }}-credentials]
  verbs: [get, update]
{{- end }}

{{/* For the NetworkPolicies of jobs, if the values ask for them. */}}
{{- define "meshwright.networkPolicyRules" -}}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create, get]
{{- end }}

{{/* What the operator allows in the NetworkPolicies of jobs, as JSON. The coordinator's pods, or else the port of its URL. */}}
{{- define "meshwright.jobNetworkPolicies" -}}
{{- $options := dict "metricsFrom" .Values.networkPolicy.metricsFrom "egress" .Values.networkPolicy.jobs.egress -}}
{{- $url := urlParse (include "meshwright.coordinatorUrl" . | trim) -}}
{{- $port := regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default (ternary "80" "443" (eq $url.scheme "http")) -}}
{{- $_ := set $options "coordinatorPort" (int $port) -}}
{{- if not .Values.coordinator.url -}}
{{- $namespace := dict "matchLabels" (dict "kubernetes.io/metadata.name" .Release.Namespace) -}}
{{- $pods := dict "matchLabels" (include "meshwright.selector" . | fromYaml) -}}
{{- $_ := set $options "coordinator" (list (dict "namespaceSelector" $namespace "podSelector" $pods)) -}}
{{- end -}}
{{ toJson $options }}
{{- end }}

{{/*
What the operator does with jobs and their children, and nothing else. It creates token secrets, and can neither read nor
change any of them: the answer to a patch contains the object, too. It reads claims before it places a job that names them,
and lists the events of a pod that does not start, to say why. It reads a service only to find out whose it is, and
updates finalizers only in the sense of clusters that check the right to set `blockOwnerDeletion`.
*/}}
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
  resources: [services]
  verbs: [create, get]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch, list]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list]
- apiGroups: [resource.k8s.io]
  resources: [resourceclaims, resourceclaimtemplates]
  verbs: [get]
- apiGroups: [resource.nvidia.com]
  resources: [computedomains]
  verbs: [create, get]
{{- end }}

{{/*
Kueue: the operator makes and follows the Workload of a job that names a queue. It reads the flavors that were assigned, and
the class of a job's priority.
*/}}
{{- define "meshwright.kueueRules" -}}
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [patch]
{{- end }}

{{- define "meshwright.kueueClusterRules" -}}
- apiGroups: [kueue.x-k8s.io]
  resources: [resourceflavors, workloadpriorityclasses]
  verbs: [get]
- apiGroups: [scheduling.k8s.io]
  resources: [priorityclasses]
  verbs: [get]
{{- end }}

{{/* PodGroups of Volcano, which the operator makes for jobs with `workers.podGroup`. */}}
{{- define "meshwright.volcanoRules" -}}
- apiGroups: [scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [get, create, patch, delete]
{{- end }}

{{/* PodGroups of KAI Scheduler, which the operator makes for jobs with `workers.podGroup`. */}}
{{- define "meshwright.kaiRules" -}}
- apiGroups: [scheduling.run.ai]
  resources: [podgroups]
  verbs: [get, create, patch, delete]
{{- end }}

{{/* PodGroups of the coscheduling plugin, which the operator makes for jobs with `workers.podGroup`. */}}
{{- define "meshwright.coschedulingRules" -}}
- apiGroups: [scheduling.x-k8s.io]
  resources: [podgroups]
  verbs: [get, create, patch, delete]
{{- end }}

{{/* PodGroups of kube-scheduler, which the operator makes for jobs with `workers.podGroup`. They cannot be changed. */}}
{{- define "meshwright.kubernetesRules" -}}
- apiGroups: [scheduling.k8s.io]
  resources: [podgroups]
  verbs: [get, create, delete]
{{- end }}

{{/* What `queues` adds to the rights in the namespaces that the operator serves. */}}
{{- define "meshwright.queueRules" -}}
{{- $queues := .Values.queues | default dict }}
{{- if ($queues.kueue | default dict).enabled }}
{{ include "meshwright.kueueRules" . }}
{{- end }}
{{- range $queues.podGroups }}
{{ include (printf "meshwright.%sRules" (lower .)) $ }}
{{- end }}
{{- end }}
