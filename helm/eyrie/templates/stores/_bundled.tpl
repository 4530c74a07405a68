{{/*
(dict "root" $ "component" "redis" "port" 6379 "user" 999): Service and the head of a StatefulSet of one pod.
For a trial: no backup, no replica, no tuning, one password in a Secret of the release.
*/}}

{{- define "eyrie.bundled.service" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "eyrie.fullname" .root }}-{{ .component }}
  labels: {{- include "eyrie.labels" . | nindent 4 }}
spec:
  selector: {{- include "eyrie.selector" . | nindent 4 }}
  ports:
    - {name: {{ .component }}, port: {{ .port }}, targetPort: {{ .port }}, protocol: TCP}
{{- end -}}

{{- define "eyrie.bundled.head" -}}
{{- $values := index .root.Values.bundled .component -}}
replicas: 1
serviceName: {{ include "eyrie.fullname" .root }}-{{ .component }}
selector:
  matchLabels: {{- include "eyrie.selector" . | nindent 4 }}
{{- if $values.persistence.enabled }}
{{- if and (not .root.Values.bundled.keep) (include "eyrie.atLeast" (dict "root" .root "version" "1.27")) }}
persistentVolumeClaimRetentionPolicy: {whenDeleted: Delete, whenScaled: Retain}
{{- end }}
volumeClaimTemplates:
  - metadata:
      name: data
    spec:
      accessModes: [ReadWriteOnce]
      {{- with $values.persistence.storageClass }}
      storageClassName: {{ . }}
      {{- end }}
      resources:
        requests:
          storage: {{ $values.persistence.size }}
{{- end }}
{{- end -}}

{{- define "eyrie.bundled.podHead" -}}
metadata:
  labels: {{- include "eyrie.labels" . | nindent 4 }}
  annotations:
    eyrie.dev/not-for-production: a trial's {{ .component }}; name your own by an existingSecret
{{- end -}}

{{- define "eyrie.bundled.podSecurity" -}}
serviceAccountName: default
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext: {{- toYaml (mergeOverwrite (deepCopy .root.Values.podSecurityContext) (index .root.Values.bundled .component).podSecurityContext) | nindent 2 }}
{{- end -}}

{{- define "eyrie.bundled.volumes" -}}
{{- $values := index .root.Values.bundled .component -}}
- name: tmp
  emptyDir: {}
{{- if not $values.persistence.enabled }}
- name: data
  emptyDir: {}
{{- end }}
{{- with .root.Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
