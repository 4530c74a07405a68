"""The cluster runtime: custom resources watched, jobs submitted, statuses written, endpoints deployed.

The database is the record; a resource's status is a projection of it. `resources` and `reconcile` are pure: from an
object and its job to actions. `leases` elects the leader, `client` lists, watches and writes, `controller` executes the
actions of keys in `workqueue`, `program` is the process `eyrie operator`.

Endpoints: `endpoints` reconciles their rows as Deployments and Services, rendered by `eyrie_operator.manifests`;
`deployments` builds the input of the manifests, `objects` lists existing objects and compares them with the manifests.
"""
