"""The cluster runtime: custom resources watched, jobs submitted, statuses written, endpoints deployed.

The database is the record; a resource's status is a projection of it. `resources` and `reconcile` are pure: from an
object and its job to actions. `leases` elects the leader, `watch` wraps kopf (events of the cluster), `apply` the
Kubernetes client (writes to the cluster), `controller` executes the actions, `program` is the process `eyrie operator`.

Endpoints: `endpoints` reconciles their rows as Deployments and Services, rendered by `eyrie_operator.manifests`.
`deployments` and `drafters` build the input of the manifests, `object_cache` lists existing objects, `manifest_diff`
compares them with the manifests, `metric_windows` reads engines' counters.
"""
