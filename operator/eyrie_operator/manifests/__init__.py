"""Renders an endpoint as Kubernetes objects, in plain dicts. Pure: no client, no clock.

`eyrie_operator.cluster` applies the objects of `objects.render_endpoint` by server-side apply and deletes those of
`rollout.obsolete_objects`. The desired state follows from `endpoints.plan`, the same plan that drives processes on one
machine, through `rollout.apply_plan`.

    deployment  settings of an endpoint on a cluster, beyond the endpoint itself; object names, labels, digests
    pods        the pod of one revision: command line, probes, drain, volumes, security
    objects     Deployment, ConfigMap, Service, PodDisruptionBudget of each revision; stable Service and HTTPRoute
    monitoring  PodMonitor, PrometheusRule, Grafana dashboard, KEDA scaling
    rollout     from objects to the observation that the plan reads, and from the plan's actions to the desired state
    crd         the CustomResourceDefinitions, generated from the contract
"""
