"""World 1, a Kubernetes cluster: custom resources watched, jobs submitted, statuses projected. The one door to it.

SQL is the record, a resource's status its projection. `resources` and `reconcile` are pure: what an object and its job
say, in; what to do, out. `leases` elects who may act, `watch` is kopf (what happens there), `apply` the Kubernetes
client (what we do there), `controller` carries out plans in between, `program` is all of it as `eyrie operator`.

Endpoints: `endpoints` tends their rows as Deployments and Services, which `eyrie_operator.manifests` renders.
`deployments` and `drafters` put together what the manifests want to know, `standing` lists what is there, `unchanged`
tells whether it is right, `counted` reads engines' counters.
"""
