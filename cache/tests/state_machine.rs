//! Capture, acquire, release, complete and fail in any order, all invariants checked after each step; a failure
//! shrinks to the shortest sequence.

use horizon_cache::sim::faults::Fault;
use horizon_cache::sim::transport::layers;
use horizon_cache::sim::workload::{Op, Workload};
use horizon_cache::{Geometry, Policy};
use proptest::prelude::*;

fn geometry() -> impl Strategy<Value = Geometry> {
    (1usize..=3, 2usize..=7)
        .prop_flat_map(|(layers, experts)| (Just(layers), Just(experts), 1..=experts.min(3)))
        .prop_flat_map(|(layers, experts, top_k)| {
            (
                Just((layers, experts, top_k)),
                top_k..=experts,
                top_k..=2 * top_k + 1,
            )
        })
        .prop_map(|((n, experts, top_k), capacity, spares)| Geometry {
            layers: layers(n),
            experts,
            top_k,
            capacity,
            spares,
        })
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        4 => Just(Fault::Refused),
        4 => Just(Fault::CopyFails),
        1 => Just(Fault::NeverEnds),
        1 => Just(Fault::DeviceLost),
        1 => Just(Fault::ReportedLate),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let work = || prop::option::of(0u64..1_000);
    prop_oneof![
        2 => Just(Op::Capture),
        2 => (0usize..4, work()).prop_map(|(holder, work)| Op::Release { holder, work }),
        8 => (0usize..4, 0usize..3, any::<u16>(), any::<bool>(), work()).prop_map(
            |(holder, layer, experts, waves, work)| Op::Acquire { holder, layer, experts, waves, work }
        ),
        1 => (0usize..4).prop_map(|holder| Op::Look { holder }),
        2 => (0u64..2_000).prop_map(Op::Complete),
        1 => fault().prop_map(Op::Fail),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_order_keeps_the_invariants(
        geometry in geometry(),
        policy in prop::sample::select(Policy::ALL.to_vec()),
        staging in 1usize..=3,
        ops in prop::collection::vec(op(), 1..60),
        seed in any::<u64>(),
    ) {
        let mut workload = Workload::of(geometry, policy, staging, 9, seed);
        for op in &ops {
            if !workload.apply(op) {
                break;
            }
        }
        let _ = workload.end();
    }
}
