{{/*
Where PostgreSQL, Redis and the bucket are, and which Secret says so.
An external one is named by `existingSecret`, or by a plain `url` from which the chart makes a Secret. Only without
either is the bundled one set up.
*/}}

{{- define "eyrie.database.bundled" -}}
{{- if and .Values.bundled.postgresql.enabled (not .Values.database.url) (not .Values.database.existingSecret.name) -}}yes{{- end -}}
{{- end -}}

{{- define "eyrie.broker.bundled" -}}
{{- if and .Values.bundled.redis.enabled (not .Values.broker.url) (not .Values.broker.existingSecret.name) -}}yes{{- end -}}
{{- end -}}

{{- define "eyrie.artifacts.bundled" -}}
{{- if and .Values.bundled.s3.enabled (not .Values.artifacts.url) -}}yes{{- end -}}
{{- end -}}

{{/* (dict "root" $ "store" "database"): name of the Secret. */}}
{{- define "eyrie.store.secret" -}}
{{- (index .root.Values .store).existingSecret.name | default (printf "%s-%s" (include "eyrie.fullname" .root) .store) -}}
{{- end -}}

{{/* (dict "root" $ "store" "database"): key of the URL in it. In a Secret created by the chart it is "url". */}}
{{- define "eyrie.store.key" -}}
{{- $given := (index .root.Values .store).existingSecret -}}
{{- if $given.name }}{{ $given.key }}{{ else }}url{{ end -}}
{{- end -}}

{{/* Name of the Secret with access_key and secret_key; empty where boto3 uses a web identity. */}}
{{- define "eyrie.artifacts.secret" -}}
{{- with .Values.artifacts.credentials -}}
{{- if .existingSecret -}}{{ .existingSecret }}
{{- else if or .accessKey (include "eyrie.artifacts.bundled" $) -}}{{ include "eyrie.fullname" $ }}-artifacts
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
The namespaces of the Secret with the bucket's keys that the chart creates, separated by commas: the release's, that of the
runs and that of the endpoints, whose pods cannot name a Secret of another namespace. With a volume in the bucket's place no
pod outside of the release has a use for it.
*/}}
{{- define "eyrie.artifacts.namespaces" -}}
{{- $found := list .Release.Namespace -}}
{{- if and (include "eyrie.cluster.known" .) (not (include "eyrie.cluster.volume" .)) -}}
{{- with (include "eyrie.operator.runsNamespace" .) -}}{{- $found = append $found . -}}{{- end -}}
{{- if .Values.cluster.serve -}}{{- $found = append $found (.Values.cluster.serving.namespace | default .Release.Namespace) -}}{{- end -}}
{{- end -}}
{{- $found | uniq | join "," -}}
{{- end -}}

{{- define "eyrie.api.tokenSecret" -}}
{{- .Values.api.token.existingSecret.name | default (printf "%s-api-token" (include "eyrie.fullname" .)) -}}
{{- end -}}

{{- define "eyrie.api.tokenKey" -}}
{{- with .Values.api.token.existingSecret -}}{{ if .name }}{{ .key }}{{ else }}token{{ end }}{{- end -}}
{{- end -}}

{{- define "eyrie.secretKey.secret" -}}
{{- .Values.secretKey.existingSecret.name | default (printf "%s-secret-key" (include "eyrie.fullname" .)) -}}
{{- end -}}

{{- define "eyrie.secretKey.key" -}}
{{- with .Values.secretKey.existingSecret -}}{{ if .name }}{{ .key }}{{ else }}secret-key{{ end }}{{- end -}}
{{- end -}}

{{/*
(dict "root" $ "secret" "name" "key" "password" "length" 32), or "fernet" true for "length": the value that the Secret in the
cluster has, or a new one.
Without a server (helm template) there is nothing to look up, and each rendering makes another.
*/}}
{{- define "eyrie.keptOrNew" -}}
{{- $found := lookup "v1" "Secret" .root.Release.Namespace .secret -}}
{{- if and $found (hasKey ($found.data | default dict) .key) -}}
{{- index $found.data .key | b64dec -}}
{{- else -}}
{{- /* A Fernet key is 32 bytes in URL-safe base64. */ -}}
{{- if .fernet }}{{ randBytes 32 | replace "+" "-" | replace "/" "_" }}{{ else }}{{ randAlphaNum .length }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* Fails for what the schema cannot express: a store that is not configured. */}}
{{- define "eyrie.checks" -}}
{{- if not (or .Values.database.url .Values.database.existingSecret.name .Values.bundled.postgresql.enabled) -}}
{{- fail "no database: set database.existingSecret.name (or database.url), or bundled.postgresql.enabled=true for an evaluation" -}}
{{- end -}}
{{- if not (or .Values.broker.url .Values.broker.existingSecret.name .Values.bundled.redis.enabled) -}}
{{- fail "no broker: set broker.existingSecret.name (or broker.url), or bundled.redis.enabled=true for an evaluation" -}}
{{- end -}}
{{- if not (or .Values.artifacts.url .Values.bundled.s3.enabled (include "eyrie.cluster.volume" .)) -}}
{{- fail "no artifact store: set artifacts.url to s3://bucket/prefix, cluster.stages.work to a volume, or bundled.s3.enabled=true for an evaluation" -}}
{{- end -}}
{{- if and .Values.artifacts.credentials.accessKey .Values.artifacts.credentials.existingSecret -}}
{{- fail "artifacts.credentials: accessKey and existingSecret are both set; keep one" -}}
{{- end -}}
{{- if and .Values.operator.watchNamespaces (not .Values.operator.namespaced) -}}
{{- fail "operator.watchNamespaces is set, and operator.namespaced is not: a cluster-wide operator watches them all" -}}
{{- end -}}
{{- range $part := list "worker" "shards" -}}
{{- $keda := (index $.Values $part).keda -}}
{{- if and $keda.enabled (not (include "eyrie.broker.bundled" $)) (not $keda.address) -}}
{{- fail (printf "%s.keda.enabled: KEDA cannot read the broker's URL; set %s.keda.address to host:port of the Redis" $part $part) -}}
{{- end -}}
{{- end -}}
{{- end -}}
