{{/*
What the operator may do where it watches. Every group is named, no verb is a wildcard, and no Secret can be read: what
pods need of Secrets they are given by name, by the kubelet. Groups that the server lacks are left out; after installing
Gateway API, KEDA and the like, upgrade the release.
*/}}
{{- define "eyrie.operator.rules" -}}
# Its own resources. `create` for mirrors of jobs posted to the REST API, `delete` for ttlSecondsAfterFinished.
- apiGroups: [eyrie.dev]
  resources: [drafterjobs, draftendpoints]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [eyrie.dev]
  resources: [drafterjobs/status, draftendpoints/status]
  verbs: [get, patch]
- apiGroups: [eyrie.dev]
  resources: [drafterjobs/finalizers, draftendpoints/finalizers]
  verbs: [update]
# Engines and their stable Service. Server-side apply needs `create` and `patch`. Engines' metrics are read from pod IPs,
# which needs no permission.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
# Pods of engines and, where runs are in this namespace, of stages: why they do not start.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- if or (include "eyrie.has" (dict "root" . "api" "gateway.networking.k8s.io/v1")) (include "eyrie.has" (dict "root" . "api" "gateway.networking.k8s.io/v1beta1")) }}
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if (include "eyrie.has" (dict "root" . "api" "monitoring.coreos.com/v1")) }}
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors, prometheusrules]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if (include "eyrie.has" (dict "root" . "api" "keda.sh/v1alpha1")) }}
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- end -}}

{{/* The namespace of the runs' pods, where it is known. */}}
{{- define "eyrie.operator.runsNamespace" -}}
{{- if (include "eyrie.cluster.known" .) -}}{{- .Values.operator.runsNamespace | default .Values.cluster.kubeflow.namespace | default "" -}}{{- end -}}
{{- end -}}

{{/* The namespaces that a namespaced operator watches, separated by commas. */}}
{{- define "eyrie.operator.namespaces" -}}
{{- $named := .Values.operator.watchNamespaces | default (concat (list .Release.Namespace) (keys .Values.operator.projects | sortAlpha)) -}}
{{- with .Values.operator.mirrorNamespace -}}{{- $named = append $named . -}}{{- end -}}
{{- $named | uniq | join "," -}}
{{- end -}}
