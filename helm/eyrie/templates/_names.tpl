{{/* Names and labels. A component is one of: api, worker, operator, migrations, postgresql, redis, s3. */}}

{{- define "eyrie.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* 40 characters: room for "-postgresql-data-0" and the like within the 63 of a label. */}}
{{- define "eyrie.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "eyrie.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "eyrie.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "component" "api"): what selects its pods; never changes over the life of a release. */}}
{{- define "eyrie.selector" -}}
app.kubernetes.io/name: {{ include "eyrie.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "eyrie.labels" -}}
{{ include "eyrie.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: eyrie
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* (dict "root" $ "component" "api"): the name of its ServiceAccount. */}}
{{- define "eyrie.serviceAccount" -}}
{{- $given := (index .root.Values .component).serviceAccount -}}
{{- if $given.create -}}
{{- $given.name | default (printf "%s-%s" (include "eyrie.fullname" .root) .component) -}}
{{- else -}}
{{- $given.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "image" .Values.images.api): registry/repository@digest, or :tag. */}}
{{- define "eyrie.image" -}}
{{- $repository := .image.repository -}}
{{- with .root.Values.images.registry -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .) $repository -}}
{{- end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* The same for third-party images, which are not in our registry. */}}
{{- define "eyrie.foreignImage" -}}
{{- if .digest -}}{{ printf "%s@%s" .repository .digest }}{{- else -}}{{ printf "%s:%s" .repository .tag }}{{- end -}}
{{- end -}}

{{/* Components that are Deployments of this release, as one string. */}}
{{- define "eyrie.parts" -}}
api,worker,operator{{ if .Values.shards.enabled }},shards{{ end }}
{{- end -}}
