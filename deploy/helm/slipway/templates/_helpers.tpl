{{- define "slipway.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Labels that select the pods of a component: (list $ "server") */}}
{{- define "slipway.selector" -}}
app.kubernetes.io/name: slipway
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "slipway.labels" -}}
{{ include "slipway.selector" . }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end }}

{{- define "slipway.hubToken" -}}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .Values.model.hubSecret }}, key: token, optional: true}
{{- end }}

{{- define "slipway.access" -}}
{{- with .Values.access.secret }}
- name: OPTION_ROUTER_SECRET
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: router}
- name: OPTION_ADMIN_API_KEY
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: admin}
{{- end }}
{{- end }}

{{- define "slipway.podSecurity" -}}
runAsNonRoot: true
{{- if .Values.server.compileCache }}
# The volume's root becomes the group's. Changing what is below it on each mount would let the group
# write to compiled code, which is then not used.
fsGroup: 2000
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "slipway.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "slipway.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "slipway.selector" . | nindent 8 }}
{{- end }}

{{- define "slipway.budget" -}}
{{- $root := index . 0 }}
{{- $component := index . 1 }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $root.Release.Name }}-{{ $component }}
  labels: {{- include "slipway.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  # A pod that never gets ready should not keep a node from being drained.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "slipway.selector" . | nindent 6 }}
{{- end }}

{{/*
What the templates of servers are rendered with, those below: the values of the servers of a
component, `server` or `prefill`, as `.Values.server`, and what the router has them do as `.role`.
*/}}
{{- define "slipway.servers" -}}
{{- $root := index . 0 }}
{{- $component := index . 1 }}
{{- $values := deepCopy $root.Values }}
{{- $role := "" }}
{{- if eq $component "prefill" }}
{{- $role = "prefill" }}
{{- $_ := mergeOverwrite $values.server $values.prefill.server }}
{{- else if $values.prefill.enabled }}
{{- $role = "decode" }}
{{- end }}
{{- $it := dict "Values" $values "Release" $root.Release "Chart" $root.Chart }}
{{- include "slipway.serverObjects" (merge $it (dict "component" $component "role" $role)) }}
{{- end }}

{{/* The pods of servers and, with several nodes, of their leaders: what both have. */}}
{{- define "slipway.serverPod" -}}
{{- $ := . }}
{{- $multi := .Values.multiNode.enabled }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.server.serviceAccountAnnotations }}
serviceAccountName: {{ $.Release.Name }}-server
{{- end }}
# The hook, 23 s for requests, 12 s to stop.
terminationGracePeriodSeconds: {{ add .Values.server.drainSeconds 35 }}
securityContext: {{- include "slipway.podSecurity" . | nindent 2 }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.server.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.server.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.server.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if not $multi }}
{{ include "slipway.spread" (list . .component) }}
{{- end }}
containers:
  - name: server
    image: {{ include "slipway.image" . }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    args: [serve]
    env:
      {{- with .Values.model.id }}
      - {name: OPTION_MODEL_ID, value: {{ . | quote }}}
      {{- end }}
      {{- range $name, $value := .Values.server.options }}
      - {name: {{ $name }}, value: {{ $value | toString | quote }}}
      {{- end }}
      # The start fails after this, before the startup probe ends it, and the log says why.
      - {name: OPTION_MODEL_LOADING_TIMEOUT, value: {{ .Values.server.startSeconds | quote }}}
      - {name: OPTION_KV_EVENTS, value: "true"}
      {{- with .role }}
      - {name: OPTION_SERVER_ROLE, value: {{ . }}}
      {{- end }}
      {{- if $multi }}
      - {name: OPTION_TENSOR_PARALLEL_DEGREE, value: {{ .Values.server.gpus | quote }}}
      - {name: OPTION_PIPELINE_PARALLEL_DEGREE, value: {{ .Values.multiNode.nodes | quote }}}
      - {name: OPTION_DISTRIBUTED_EXECUTOR_BACKEND, value: mp}
      - {name: OPTION_NNODES, value: {{ .Values.multiNode.nodes | quote }}}
      - {name: OPTION_NODE_RANK, value: "0"}
      - {name: OPTION_MASTER_ADDR, value: $(LWS_LEADER_ADDRESS)}
      - name: VLLM_HOST_IP
        valueFrom:
          fieldRef: {fieldPath: status.podIP}
      {{- end }}
      {{- with .Values.adapters }}
      {{- if .enabled }}
      - {name: OPTION_ENABLE_LORA, value: "true"}
      {{- if .volume }}
      - {name: OPTION_ADAPTER_LIST, value: /mnt/adapters/list}
      - {name: OPTION_ADAPTER_ROOTS, value: "/mnt/adapters,/opt/ml/model"}
      {{- end }}
      {{- with .buckets }}
      - {name: OPTION_ADAPTER_BUCKETS, value: {{ join "," . | quote }}}
      {{- end }}
      {{- end }}
      {{- end }}
      {{- if .Values.server.compileCache }}
      - {name: OPTION_CACHE_FOLDER, value: /compile-cache/slipway}
      {{- end }}
      {{- if .Values.cache.enabled }}
      - {name: OPTION_KV_L2_URL, value: "redis://{{ .Release.Name }}-cache"}
      {{- end }}
      {{- with include "slipway.access" . }}
      {{- . | nindent 6 }}
      {{- end }}
      {{- include "slipway.hubToken" . | nindent 6 }}
      {{- with .Values.server.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    ports:
      - {name: http, containerPort: 8080}
      - {name: kv-events, containerPort: 5557}
      - {name: kv-events-log, containerPort: 5558}
    resources: {{- include "slipway.serverResources" . | nindent 6 }}
    # 503 while the model is fetched and loaded. A start that fails ends the process, so that this
    # ends only those that hang.
    startupProbe:
      httpGet: {path: /ping, port: http}
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: {{ div (add .Values.server.startSeconds 100) 5 }}
    readinessProbe:
      httpGet: {path: /ping, port: http}
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: 3
    livenessProbe:
      httpGet: {path: /ping, port: http}
      periodSeconds: 15
      timeoutSeconds: 15
      failureThreshold: 8
    lifecycle:
      preStop:
        sleep: {seconds: {{ .Values.server.drainSeconds }}}
    terminationMessagePolicy: FallbackToLogsOnError
    securityContext: {{- include "slipway.containerSecurity" . | nindent 6 }}
    volumeMounts: {{- include "slipway.serverMounts" . | nindent 6 }}
volumes: {{- include "slipway.serverVolumes" . | nindent 2 }}
{{- end }}

{{- define "slipway.serverResources" -}}
requests:
  cpu: {{ .Values.server.cpu | quote }}
  memory: {{ .Values.server.memory }}
  ephemeral-storage: {{ .Values.server.ephemeralStorage }}
limits:
  {{- if .Values.server.gpus }}
  nvidia.com/gpu: {{ .Values.server.gpus | quote }}
  {{- end }}
  memory: {{ .Values.server.memory }}
{{- end }}

{{- define "slipway.serverMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- if .Values.server.diskCache }}
- {name: kv, mountPath: /tmp/lmcache}
{{- end }}
{{- if .Values.server.compileCache }}
- {name: compile-cache, mountPath: /compile-cache}
{{- end }}
{{- if .Values.adapters.volume }}
- {name: adapters, mountPath: /mnt/adapters}
{{- end }}
{{- if .Values.model.volume }}
- {name: model, mountPath: /opt/ml/model, readOnly: true}
{{- end }}
{{- end }}

{{- define "slipway.serverVolumes" -}}
- name: tmp
  emptyDir: {}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.server.sharedMemory }}}
{{- with .Values.server.diskCache }}
- name: kv
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.server.compileCache }}
- name: compile-cache
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.adapters.volume }}
- name: adapters
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.model.volume }}
- name: model
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "slipway.check" -}}
{{- if and (not .Values.model.id) (not .Values.model.volume) }}
{{- fail "model.id or model.volume: one of them has to say where the model is" }}
{{- end }}
{{- if and .Values.gateway.enabled (not .Values.router.enabled) }}
{{- fail "gateway.enabled needs router.enabled: the router is the endpoint picker" }}
{{- end }}
{{- if and .Values.gateway.selfSigned .Values.gateway.tlsSecret }}
{{- fail "gateway.selfSigned and gateway.tlsSecret: a picker shows one certificate" }}
{{- end }}
{{- if and .Values.gateway.objectives (not .Values.access.secret) }}
{{- fail "gateway.objectives needs access.secret: by it routers tell servers how important a request is" }}
{{- end }}
{{- if and .Values.multiNode.enabled (ne .Values.autoscaling.kind "none") }}
{{- fail "autoscaling.kind: several nodes for one server (multiNode) are not scaled; it has to be none" }}
{{- end }}
{{- if and .Values.multiNode.enabled (not .Values.server.gpus) }}
{{- fail "server.gpus: several nodes for one server need GPUs" }}
{{- end }}
{{- if and (eq .Values.router.strategy "kvaware") .Values.router.enabled (not .Values.model.id) (not .Values.model.tokenizer) }}
{{- fail "model.tokenizer: the router's strategy kvaware reads a tokenizer, and there is no model.id" }}
{{- end }}
{{- if .Values.prefill.enabled }}
{{- if not .Values.router.enabled }}
{{- fail "prefill.enabled needs router.enabled: the router sends these servers their prompts" }}
{{- end }}
{{- if not .Values.access.secret }}
{{- fail "prefill.enabled needs access.secret: by it servers know what the router has them do" }}
{{- end }}
{{- if not (has .Values.router.strategy (list "prefixaware" "kvaware")) }}
{{- fail "prefill.enabled: router.strategy has to be prefixaware or kvaware, which know what is cached" }}
{{- end }}
{{- if .Values.multiNode.enabled }}
{{- fail "prefill.enabled: several nodes for one server (multiNode) have no KV caches to hand over" }}
{{- end }}
{{- if not (or .Values.cache.enabled .Values.server.options.OPTION_KV_L2_URL) }}
{{- fail "prefill.enabled needs a store that all servers share: cache.enabled, or OPTION_KV_L2_URL in server.options" }}
{{- end }}
{{- end }}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) }}
{{- fail "autoscaling.minReplicas is more than autoscaling.maxReplicas" }}
{{- end }}
{{- end }}
