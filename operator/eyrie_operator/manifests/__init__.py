"""Renders an endpoint as Kubernetes objects, in plain dicts. Pure: no client, no clock.

`eyrie_operator.cluster` applies the objects of `endpoint.render_endpoint` by server-side apply and deletes those of
`rollout.obsolete_objects`. The desired state follows from `endpoints.plan`, the same plan that drives processes on one
machine, through `rollout.apply_plan`.

    deployment  settings of an endpoint on a cluster, beyond the endpoint itself
    engines     the command line of one revision: SGLang or the embedded engine
    pods        the pod of one revision: probes, drain, volumes, security
    workloads   Deployment or LeaderWorkerSet, ConfigMap, Service, PodDisruptionBudget of one revision
    traffic     the stable Service, and weights by HTTPRoute where a gateway is configured
    monitoring  PodMonitor, PrometheusRule, Grafana dashboard, KEDA scaling
    observed    from workloads and pods to the observation that the plan reads
    rollout     from the plan's actions to the desired state, and from objects to the current state
    names       object names, labels, digests
"""
