//! Whatever text comes, a network or a machine: no panic. What parses is planned, and no plan is
//! better than its bound.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pleach_training::parallelize::{Machine, Network, Planner, machine_from_toml, network_from_toml};

/// More layers only take longer.
const LAYERS_PLANNED_MAX: usize = 16;

fuzz_target!(|text: &str| {
    let network = network_from_toml(text).ok().filter(|network| network.layers().len() <= LAYERS_PLANNED_MAX);
    let machine = machine_from_toml(text).ok();
    if network.is_none() && machine.is_none() {
        // The built-in network takes a thousand times as long to plan as a text to refuse.
        return;
    }
    let network = network.or_else(|| Network::named("vgg-a")).expect("is built in");
    let machine = machine.or_else(|| Machine::named("aws-10g")).expect("is built in");
    for ranks in [1, 12, 64] {
        if let Ok(plan) = Planner::new(&network, &machine, 100).plan(ranks) {
            assert!(plan.speedup() > 0.0 && plan.speedup() <= plan.bound());
            assert!(plan.step_s().is_finite() && plan.delay_s() >= 0.0);
        }
    }
});
