{{/*
The cluster profile (eyrie_api.contract.cluster): what `cluster` says, over what the chart knows by itself. Rendered only
where cluster.kubeflow.url is set: without Kubeflow there is nowhere to run a job.
*/}}

{{- define "eyrie.cluster.known" -}}
{{- if .Values.cluster.kubeflow.url -}}yes{{- end -}}
{{- end -}}

{{/* A pod of a stage, or of an engine that runs our own programs. */}}
{{- define "eyrie.cluster.placement" -}}
image: {{ include "eyrie.image" (dict "root" . "image" .Values.images.workers) }}
image_pull_policy: {{ .Values.images.pullPolicy }}
{{- with .Values.images.pullSecrets }}
image_pull_secrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The artifact store's address for stages: they may run in another namespace, so a bundled one has its full DNS name. */}}
{{- define "eyrie.cluster.work" -}}
kind: s3
{{- if (include "eyrie.artifacts.bundled" .) }}
url: s3://eyrie
endpoint_url: http://{{ include "eyrie.fullname" . }}-s3.{{ .Release.Namespace }}.svc:9000
{{- else }}
url: {{ .Values.artifacts.url | quote }}
{{- with .Values.artifacts.endpointUrl }}
endpoint_url: {{ . | quote }}
{{- end }}
{{- end }}
region: {{ .Values.artifacts.region | quote }}
{{- with (include "eyrie.artifacts.secret" .) }}
credentials_secret: {{ . }}
{{- end }}
{{- end -}}

{{- define "eyrie.cluster.profile" -}}
{{- $given := .Values.cluster -}}
{{- $kubeflow := deepCopy $given.kubeflow -}}
{{- if $given.access.tokenAudience -}}{{- $_ := set $kubeflow "token_file" "/var/run/secrets/eyrie/kubeflow/token" -}}{{- end -}}
{{- if $given.access.caConfigMap -}}{{- $_ := set $kubeflow "ca_file" "/etc/eyrie/kubeflow/ca.crt" -}}{{- end -}}
{{- $python := $given.python | default .Values.images.python -}}
{{- $stages := mergeOverwrite (include "eyrie.cluster.placement" . | fromYaml) (deepCopy $given.stages) -}}
{{- if not $given.stages.work -}}{{- $_ := set $stages "work" (include "eyrie.cluster.work" . | fromYaml) -}}{{- end -}}
{{- $single := dict -}}
{{- range $stage, $placement := $given.per_stage -}}
{{- $_ := set $single $stage (mergeOverwrite (deepCopy $stages) (deepCopy $placement)) -}}
{{- end -}}
{{- $profile := dict "kubeflow" $kubeflow "stages" $stages "per_stage" $single "home" "/var/lib/eyrie" "python" $python "node_gpus" $given.node_gpus "max_runs" $given.max_runs "sync_s" $given.sync_s -}}
{{- with $given.model_cache -}}{{- $_ := set $profile "model_cache" . -}}{{- end -}}
{{- if $given.serve -}}
{{- $pods := dict "namespace" .Release.Namespace "placement" (include "eyrie.cluster.placement" . | fromYaml) "python" $python -}}
{{- $_ := set $profile "serving" (mergeOverwrite $pods (deepCopy $given.serving)) -}}
{{- end -}}
{{- toYaml $profile -}}
{{- end -}}

{{/*
The claim of the model cache, where endpoints stand in the release's namespace: the control plane reads the config.json of
targets there, for plans and for the command lines of engines.
*/}}
{{- define "eyrie.cluster.modelClaim" -}}
{{- $given := .Values.cluster -}}
{{- if and (include "eyrie.cluster.known" .) $given.serve (eq ($given.serving.namespace | default .Release.Namespace) .Release.Namespace) -}}
{{- ($given.model_cache).claim | default "" -}}
{{- end -}}
{{- end -}}

{{/* The claim of the work area, if it is a volume: it then contains the control plane's home. */}}
{{- define "eyrie.cluster.volume" -}}
{{- with .Values.cluster.stages.work -}}
{{- if eq .kind "volume" -}}{{- .claim -}}{{- end -}}
{{- end -}}
{{- end -}}
