{{/* Parts of a pod that all components share. */}}

{{- define "eyrie.podSecurity" -}}
{{- toYaml .Values.podSecurityContext -}}
{{- end -}}

{{- define "eyrie.containerSecurity" -}}
{{- toYaml .Values.containerSecurityContext -}}
{{- end -}}

{{/* (dict "root" $ "part" .Values.api): scheduling constraints and priority of a pod. */}}
{{- define "eyrie.scheduling" -}}
{{- with .part.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .part.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "component" "api"): spread over nodes unless the values configure it. */}}
{{- define "eyrie.spread" -}}
{{- $part := index .root.Values .component -}}
{{- if $part.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml $part.topologySpreadConstraints | nindent 2 }}
{{- else if gt (int $part.replicas) 1 }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "eyrie.selector" . | nindent 8 }}
{{- end }}
{{- end -}}

{{/*
(dict "root" $ "component" "api"): annotations of its pods. The checksums restart them when a setting changes; of
generated secrets none is taken, since without a server each rendering makes another.
*/}}
{{- define "eyrie.podAnnotations" -}}
{{- $values := .root.Values -}}
checksum/settings: {{ include "eyrie.settings" .root | sha256sum }}
checksum/cluster: {{ toJson $values.cluster | sha256sum }}
checksum/stores: {{ list $values.database $values.broker $values.artifacts $values.api.token $values.secretKey | toJson | sha256sum }}
{{- with (index $values .component).podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The settings that are not secret, as a ConfigMap's data. */}}
{{- define "eyrie.settings" -}}
EYRIE_HOME: /var/lib/eyrie
EYRIE_CHORE_QUEUE: {{ include "eyrie.fullname" . }}
{{- if (include "eyrie.artifacts.bundled" .) }}
EYRIE_ARTIFACTS_URL: s3://eyrie
EYRIE_ARTIFACTS_ENDPOINT_URL: http://{{ include "eyrie.fullname" . }}-s3:9000
{{- else }}
{{- with .Values.artifacts.url }}
EYRIE_ARTIFACTS_URL: {{ . | quote }}
{{- end }}
{{- with .Values.artifacts.endpointUrl }}
EYRIE_ARTIFACTS_ENDPOINT_URL: {{ . | quote }}
{{- end }}
{{- end }}
EYRIE_ARTIFACTS_REGION: {{ .Values.artifacts.region | quote }}
EYRIE_ARTIFACTS_ADDRESSING: {{ .Values.artifacts.addressing | quote }}
{{- if (include "eyrie.artifacts.secret" .) }}
EYRIE_ARTIFACTS_CREDENTIALS_DIR: /var/run/secrets/eyrie/artifacts
{{- end }}
{{- range $name, $value := .Values.settings }}
{{- /* Helm reads every number as a float, and would write 2097152 as 2.097152e+06. */}}
{{- if kindIs "float64" $value }}{{ if eq (floor $value) $value }}{{ $value = int64 $value }}{{ end }}{{ end }}
EYRIE_{{ upper $name }}: {{ $value | toString | quote }}
{{- end }}
{{- end -}}

{{/* The one variable that `eyrie migrate` needs. */}}
{{- define "eyrie.databaseVariable" -}}
- name: EYRIE_DATABASE_URL
  valueFrom:
    secretKeyRef:
      name: {{ include "eyrie.store.secret" (dict "root" . "store" "database") }}
      key: {{ include "eyrie.store.key" (dict "root" . "store" "database") }}
{{- end -}}

{{- define "eyrie.brokerVariable" -}}
- name: EYRIE_BROKER_URL
  valueFrom:
    secretKeyRef:
      name: {{ include "eyrie.store.secret" (dict "root" . "store" "broker") }}
      key: {{ include "eyrie.store.key" (dict "root" . "store" "broker") }}
{{- end -}}

{{/* For the API server, which creates webhooks, and the worker, which signs deliveries to them. */}}
{{- define "eyrie.secretKeyVariable" -}}
- name: EYRIE_SECRET_KEY
  valueFrom:
    secretKeyRef:
      name: {{ include "eyrie.secretKey.secret" . }}
      key: {{ include "eyrie.secretKey.key" . }}
{{- end -}}

{{/*
Who runs here. The root file system is read-only: what looks for a home finds one that may be lost. And the user may be
one that /etc/passwd does not know, as on OpenShift: libraries that ask for the user's name look here first.
*/}}
{{- define "eyrie.userVariables" -}}
- {name: HOME, value: /tmp}
- {name: USER, value: eyrie}
{{- end -}}

{{/* (dict "root" $ "component" "api"): environment variables of a component of the control plane. */}}
{{- define "eyrie.variables" -}}
envFrom:
  - configMapRef:
      name: {{ include "eyrie.fullname" .root }}-settings
env:
  {{- include "eyrie.databaseVariable" .root | nindent 2 }}
  {{- include "eyrie.brokerVariable" .root | nindent 2 }}
  {{- if (include "eyrie.cluster.known" .root) }}
  - {name: EYRIE_CLUSTER_PROFILE, value: /etc/eyrie/cluster/profile.yaml}
  {{- end }}
  {{- if (include "eyrie.cluster.modelClaim" .root) }}
  - {name: HF_HUB_CACHE, value: /var/cache/eyrie/models}
  {{- end }}
  {{- include "eyrie.userVariables" . | nindent 2 }}
  {{- with (index .root.Values .component).extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Mounts of every component, and further ones of those that use the cluster profile. */}}
{{- define "eyrie.storeMounts" -}}
- {name: tmp, mountPath: /tmp}
- name: home
  mountPath: /var/lib/eyrie
  {{- with (.Values.cluster.stages.work).sub_path }}
  subPath: {{ . }}
  {{- end }}
{{- if (include "eyrie.artifacts.secret" .) }}
- {name: artifacts, mountPath: /var/run/secrets/eyrie/artifacts, readOnly: true}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "eyrie.mounts" -}}
{{ include "eyrie.storeMounts" . }}
{{- if (include "eyrie.cluster.known" .) }}
- {name: cluster, mountPath: /etc/eyrie/cluster, readOnly: true}
{{- end }}
{{- if (include "eyrie.cluster.modelClaim" .) }}
- {name: model-cache, mountPath: /var/cache/eyrie/models, readOnly: true}
{{- end }}
{{- end -}}

{{- define "eyrie.storeVolumes" -}}
- name: tmp
  emptyDir: {}
- name: home
  {{- if (include "eyrie.cluster.volume" .) }}
  persistentVolumeClaim: {claimName: {{ include "eyrie.cluster.volume" . }}}
  {{- else }}
  {{- toYaml .Values.home.volume | nindent 2 }}
  {{- end }}
{{- with (include "eyrie.artifacts.secret" .) }}
- name: artifacts
  secret:
    secretName: {{ . }}
    # The pod's user is in fsGroup; others cannot read it.
    defaultMode: 0440
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "eyrie.volumes" -}}
{{ include "eyrie.storeVolumes" . }}
{{- if (include "eyrie.cluster.known" .) }}
- name: cluster
  configMap:
    name: {{ include "eyrie.fullname" . }}-cluster
{{- end }}
{{- with (include "eyrie.cluster.modelClaim" .) }}
- name: model-cache
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "image" .Values.images.api): waits until the tables are migrated, so that no component runs on old ones. */}}
{{- define "eyrie.waitForTables" -}}
- name: wait-for-tables
  image: {{ include "eyrie.image" . }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  command: {{- toYaml .root.Values.images.program | nindent 4 }}
  args: [migrate, --check, --timeout, "600"]
  env:
    {{- include "eyrie.databaseVariable" .root | nindent 4 }}
    {{- include "eyrie.userVariables" . | nindent 4 }}
  resources: {{- toYaml .root.Values.migrations.resources | nindent 4 }}
  securityContext: {{- include "eyrie.containerSecurity" .root | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    {{- with .root.Values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
