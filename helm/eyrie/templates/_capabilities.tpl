{{/*
What the server has. "yes" or nothing, so that `if (include ...)` reads well.
`capabilities.apiVersions` adds to what it shows, for renderers that talk to no server.
*/}}

{{/* (dict "root" $ "api" "keda.sh/v1alpha1") */}}
{{- define "eyrie.has" -}}
{{- if or (.root.Capabilities.APIVersions.Has .api) (has .api .root.Values.capabilities.apiVersions) -}}yes{{- end -}}
{{- end -}}

{{/* (dict "root" $ "version" "1.27") */}}
{{- define "eyrie.atLeast" -}}
{{- if semverCompare (printf ">=%s-0" .version) .root.Capabilities.KubeVersion.Version -}}yes{{- end -}}
{{- end -}}

{{- define "eyrie.budgetApi" -}}
{{- if (include "eyrie.has" (dict "root" . "api" "policy/v1")) -}}policy/v1
{{- else if (include "eyrie.has" (dict "root" . "api" "policy/v1beta1")) -}}policy/v1beta1
{{- end -}}
{{- end -}}

{{/*
Takes CEL rules out of a definition, in place. Servers before 1.25 would drop them by themselves, but Helm holds what it
sends against the server's schema first, and gives up.
*/}}
{{- define "eyrie.dropRules" -}}
{{- if kindIs "map" . -}}
{{- $_ := unset . "x-kubernetes-validations" -}}
{{- range $_, $value := . -}}{{- include "eyrie.dropRules" $value -}}{{- end -}}
{{- else if kindIs "slice" . -}}
{{- range . -}}{{- include "eyrie.dropRules" . -}}{{- end -}}
{{- end -}}
{{- end -}}
