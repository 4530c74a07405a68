"""An endpoint as Kubernetes objects: values in, plain dicts out. Pure; nothing here knows a client or a clock.

`eyrie_operator.cluster` applies what `endpoint.render_endpoint` returns by server-side apply and deletes what
`rollout.obsolete_objects` names. What should stand follows from `serving.plan_endpoint`, the same plan that drives
processes on one machine, through `rollout.apply_plan`.

    deployment  what an operator decides about an endpoint, beyond what the endpoint itself says
    engines     the command line of one revision: SGLang or the embedded engine
    pods        the pod of one revision: probes, drain, volumes, security
    workloads   Deployment or LeaderWorkerSet, ConfigMap, Service, PodDisruptionBudget of one revision
    traffic     the stable Service, and weights by HTTPRoute where a gateway is given
    monitoring  PodMonitor, PrometheusRule, Grafana dashboard, KEDA scaling
    observed    what workloads and pods say of the engines, in the words of the plan
    rollout     from the plan's actions to what should stand, and back from what stands
    names       object names, labels, digests
"""
