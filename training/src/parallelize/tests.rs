//! The planner beside closed forms, the paper's figures, and texts that are wrong.

use proptest::prelude::*;

use super::*;

fn network(name: &str) -> Network {
    Network::named(name).expect("is built in")
}

fn machine(name: &str) -> Machine {
    Machine::named(name).expect("is built in")
}

fn is_near(found: f64, expected: f64, share: f64) -> bool {
    (found - expected).abs() <= share * expected
}

fn expect_near(what: &str, found: f64, expected: f64, share: f64) {
    assert!(is_near(found, expected, share), "{what}: {found}, not within {share} of {expected}");
}

#[test]
fn convolutions_take_three_quarters_of_their_output_and_images_in_operations_for_each_byte() {
    let vgg = network("vgg-a");
    for (layer, side) in vgg.layers().iter().zip([224.0_f64, 112.0, 56.0, 56.0, 28.0, 28.0, 14.0, 14.0]) {
        for images in [1.0, 4.0, 512.0] {
            expect_near(layer.name(), layer.flop_per_byte(images), 0.75 * side * side * images, 1e-12);
        }
    }
}

#[test]
fn the_fewest_bytes_are_at_the_groups_of_the_closed_form() {
    let vgg = network("vgg-a");
    let layer = &vgg.layers()[9];
    assert_eq!(layer.shape(), Shape::FullyConnected { inputs: 4_096, outputs: 4_096 });
    let ideal = ideal_groups(layer, false, 512, 64);
    expect_near("groups", ideal, 8.0_f64.sqrt(), 1e-12);
    // Of a first layer activations travel one way.
    expect_near("groups", ideal_groups(layer, true, 512, 64), 2.0, 1e-12);
    assert_eq!(format!("{ideal:.2}"), "2.83");
    // Bytes alone leave 2 and 4; no other divisor of 64 has as few.
    let free =
        Machine::new("no messages", Rates { latency_s: 0.0, message_s: 0.0, ..machine("aws-10g").rates() });
    let free = free.expect("a machine");
    let bytes = |groups| {
        let plan = LayerPlan::new(layer, false, &free, 512, (64, groups));
        plan.activations().bytes + plan.weights().bytes
    };
    let (two, four) = (bytes(2), bytes(4));
    assert!([1, 8, 16, 32, 64].into_iter().all(|groups| bytes(groups) > two.max(four)), "{two} {four}");
    let plan = Planner::new(&vgg, &free, 512).plan(64).expect("a plan");
    assert!([2, 4].contains(&plan.layers()[9].groups()), "{}", plan.layers()[9].groups());
}

#[test]
fn bytes_and_messages_are_those_of_the_formulas() {
    let (vgg, aries) = (network("vgg-a"), machine("haswell-aries"));
    let plan = Planner::new(&vgg, &aries, 256).with_split(Split::Groups(4)).plan(16).expect("a plan");
    for (layer, plan) in vgg.layers().iter().zip(plan.layers()) {
        let (weights, activations) = (plan.weights(), plan.activations());
        match layer.shape() {
            Shape::Convolution { .. } => {
                assert_eq!((plan.groups(), activations.bytes, activations.messages), (16, 0, 0));
                assert_eq!((weights.bytes, weights.messages), (2 * 4 * layer.weights() * 15 / 16, 30));
            }
            Shape::FullyConnected { inputs, outputs } => {
                // 16 ranks in 4 groups of 4, of 64 images each.
                assert_eq!((activations.bytes, activations.messages), (2 * 4 * inputs * 64 * 3 / 4, 6));
                assert_eq!((weights.bytes, weights.messages), (2 * 4 * inputs * (outputs / 4) * 3 / 4, 6));
            }
        }
    }
    // One kind of parallelism has one kind of exchange.
    let data = Planner::new(&vgg, &aries, 256).with_split(Split::Data).plan(16).expect("a plan");
    assert!(data.layers().iter().all(|layer| layer.activations().bytes == 0 && layer.split() == Split::Data));
    let model = Planner::new(&vgg, &aries, 256).with_split(Split::Model).plan(16).expect("a plan");
    assert!(
        model.layers()[8..].iter().all(|layer| layer.weights().bytes == 0 && layer.split() == Split::Model)
    );
}

#[test]
fn networks_have_the_operations_and_weights_that_are_published() {
    let sums = |name: &str| {
        let network = network(name);
        let sum = |of: fn(&Layer) -> u64| network.layers().iter().map(of).sum::<u64>();
        (sum(Layer::multiply_adds), sum(Layer::weights))
    };
    assert_eq!(sums("vgg-a"), (7_609_090_048, 132_851_392));
    assert_eq!(sums("overfeat-fast"), (2_801_403_904, 145_909_792));
    assert_eq!(sums("dnn-7").1, 45_121_536);
    // torchvision has 25,557,032 parameters with 53,120 of normalization and 1,000 biases.
    assert_eq!(sums("resnet-50"), (4_089_184_256, 25_557_032 - 53_120 - 1_000));
    assert_eq!(network("resnet-50").layers().len(), 54);
    assert!(NETWORKS.iter().all(|name| network(name).name() == *name));
    assert!(MACHINES.iter().all(|name| machine(name).name() == *name));
}

/// The rows of the paper with the bound and the fit that a prototype found.
const GOLDEN: [(f64, f64); 5] = [(122.8, 103.9), (61.5, 53.6), (55.8, 41.0), (10.7, 9.9), (14.8, 13.4)];

#[test]
fn each_speedup_of_the_paper_is_below_the_bound_and_near_the_fit() {
    for (claim, (bound, fit)) in CLAIMS.iter().zip(GOLDEN) {
        let (network, machine) = (network(claim.network), machine(claim.machine));
        let plan = Planner::new(&network, &machine, claim.batch).plan(claim.ranks).expect("a plan");
        let row = format!("{} {} on {}", network.name(), claim.batch, claim.ranks);
        assert_eq!(plan.paper(), Some(claim.speedup));
        assert!(plan.bound() >= claim.speedup, "{row}: bound {}", plan.bound());
        let factor = (plan.speedup() / claim.speedup).max(claim.speedup / plan.speedup());
        let most = if claim.network == "dnn-7" { 1.6 } else { 1.2 };
        assert!(factor <= most, "{row}: {} beside {}", plan.speedup(), claim.speedup);
        // The prototype took the groups of its own row alone, and so a lower bound for the DNN.
        assert!(
            plan.bound() >= 0.99 * bound && plan.bound() <= 1.07 * bound,
            "{row}: bound {}",
            plan.bound()
        );
        expect_near(&row, plan.speedup(), fit, 0.05);
    }
}

#[test]
fn first_layers_first_pays_where_communicating_takes_about_as_long_as_computing() {
    let vgg = network("vgg-a");
    // Data parallel, with the wires alone: ranks, GB/s, planned and first come, first served.
    for (ranks, gb_per_s, planned, fifo) in
        [(16, 1.1, 9.9, 8.2), (64, 6.0, 50.5, 40.0), (16, 6.0, 16.0, 16.0)]
    {
        let rates = Rates { bytes_per_s: gb_per_s * 1e9, ..machine("haswell-aries").wires_alone().rates() };
        let machine = Machine::new("wires", rates).expect("a machine");
        let planner = Planner::new(&vgg, &machine, 256).with_split(Split::Data);
        let speedup = |order| planner.with_order(order).plan(ranks).expect("a plan").speedup();
        expect_near("planned", speedup(OrderRule::Planned), planned, 0.02);
        expect_near("fifo", speedup(OrderRule::Fifo), fifo, 0.02);
    }
}

#[test]
fn ranks_are_used_well_up_to_the_design_point_and_not_beyond() {
    let (vgg, aries, aws) = (network("vgg-a"), machine("haswell-aries"), machine("aws-10g"));
    let mut points = Vec::new();
    for (machine, batch) in [(&aries, 256), (&aries, 512), (&aws, 512)] {
        let planner = Planner::new(&vgg, machine, batch);
        let point = planner.design_point().expect("a plan");
        let efficiency = |ranks| planner.plan(ranks).expect("a plan").efficiency();
        assert!(
            efficiency(point) >= DESIGN_EFFICIENCY && efficiency(2 * point) < DESIGN_EFFICIENCY,
            "{point}"
        );
        points.push(point);
    }
    // More images or a quicker network bear more ranks.
    assert!(points[0] < points[1] && points[2] < points[1] && points[2] > 1, "{points:?}");
}

#[test]
fn more_ranks_than_images_leave_ranks_without_work() {
    let (vgg, aries) = (network("vgg-a"), machine("haswell-aries"));
    let planner = Planner::new(&vgg, &aries, 4).with_split(Split::Data);
    let plan = |ranks| planner.plan(ranks).expect("a plan");
    // Without exchanges: computing on 8 ranks takes as long as on 4.
    expect_near("computing", plan(8).computing_s(), plan(4).computing_s(), 1e-12);
    assert!(plan(8).bound() <= 4.0 && plan(3).bound() <= 2.0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn a_step_is_its_parts_and_no_plan_is_better_than_its_bound(
        name in prop::sample::select(&NETWORKS[..]),
        cluster in prop::sample::select(&MACHINES[..]),
        batch in 1..2_000_u64,
        ranks in 1..300_u32,
    ) {
        let (network, machine) = (network(name), machine(cluster));
        let planner = Planner::new(&network, &machine, batch);
        let plan = planner.plan(ranks).expect("a plan");
        let sum = plan.computing_s() + plan.exposed_s() + plan.delay_s();
        prop_assert!(is_near(plan.step_s(), sum, 1e-9));
        prop_assert!(plan.speedup() <= plan.bound());
        prop_assert!(plan.speedup() <= f64::from(ranks) * 1.000_001);
        if ranks == 1 {
            prop_assert_eq!((plan.speedup(), plan.exposed_s(), plan.delay_s()), (1.0, 0.0, 0.0));
        }
        let fifo = planner.with_order(OrderRule::Fifo).plan(ranks).expect("a plan");
        prop_assert!(plan.step_s() <= fifo.step_s() * (1.0 + 1e-12));
        for (layer, plan) in network.layers().iter().zip(plan.layers()) {
            prop_assert!(plan.hidden_s() <= plan.overlapped_s());
            // No divisor communicates for less time.
            for groups in split::divisors(ranks) {
                let other = LayerPlan::new(layer, false, &machine, batch, (ranks, groups));
                let time_s = |plan: &LayerPlan| plan.exposed_s() + plan.overlapped_s();
                prop_assert!(layer.name().starts_with("conv") || time_s(plan) <= time_s(&other));
            }
        }
    }
}

#[test]
fn what_cannot_be_planned_is_refused_with_what_to_do() {
    let (vgg, aries) = (network("vgg-a"), machine("haswell-aries"));
    let refused = |planner: Planner<'_>, ranks| planner.plan(ranks).expect_err("bad").to_string();
    let planner = Planner::new(&vgg, &aries, 512);
    assert!(
        refused(planner, 0).contains("give 1 to 65536") && refused(planner, 65_537).contains("65537 ranks")
    );
    assert!(refused(Planner::new(&vgg, &aries, 0), 1).contains("a minibatch of 0 images"));
    assert_eq!(
        refused(planner.with_split(Split::Groups(7)), 64),
        "7 groups of 64 ranks are not equal; the nearest number that divides 64 is 8"
    );
    let slow = Rates { flop_per_s: 1e6, ..aries.rates() };
    let slow = Machine::new("slow", slow).expect("a machine");
    assert!(refused(Planner::new(&vgg, &slow, BATCH_MAX), 1).contains("check the rates"));
    let rates = |rates| Machine::new("no", rates).expect_err("bad").to_string();
    assert!(rates(Rates { flop_per_s: f64::NAN, ..aries.rates() }).contains("computing in flop/s of NaN"));
    assert!(rates(Rates { bytes_per_s: f64::INFINITY, ..aries.rates() }).contains("bandwidth"));
    assert!(rates(Rates { message_s: 1e-6, ..aries.rates() }).contains("give 2e-6 to 1e0"));
    assert!(matches!(Network::new("no", Vec::new()), Err(PlanError::Layers { layers: 0 })));
    assert!(Network::named("vgg-b").is_none() && Machine::named("haswell").is_none());
    for text in ["", "group=2", "groups=0", "groups=-1", "groups=99999999999", "Data"] {
        assert!(text.parse::<Split>().expect_err("no split").to_string().contains("groups=G"), "{text}");
    }
    for text in ["auto", "data", "model", "groups=12"] {
        assert_eq!(text.parse::<Split>().map(|split| split.to_string()).as_deref(), Ok(text));
    }
}

#[cfg(feature = "files")]
mod files {
    use super::*;

    const LENET: &str = "name = \"lenet\"\n\
        [[layer]]\nkind = \"convolution\"\ninputs = 1\noutputs = 6\nkernel = 5\nside = 28\n\
        [[layer]]\nname = \"classes\"\nkind = \"fully-connected\"\ninputs = 1176\noutputs = 10\n";
    const CLUSTER: &str = "name = \"mine\"\ntflop_per_s = 1.3\ngb_per_s = 6\nlatency_us = 2\n";

    #[test]
    fn networks_and_machines_are_read_from_text() {
        let lenet = network_from_toml(LENET).expect("a network");
        let names: Vec<&str> = lenet.layers().iter().map(Layer::name).collect();
        assert_eq!((lenet.name(), names), ("lenet", vec!["layer1", "classes"]));
        assert_eq!((lenet.layers()[0].multiply_adds(), lenet.layers()[1].weights()), (6 * 25 * 784, 11_760));
        let rates = machine_from_toml(CLUSTER).expect("a machine").rates();
        assert_eq!((rates.message_s, rates.communication_share), (rates.latency_s, 0.0));
        let text = format!("{CLUSTER}message_us = 30\ncommunication_share = 0.1\n");
        assert_eq!(machine_from_toml(&text).expect("a machine").rates(), machine("haswell-aries").rates());
    }

    #[test]
    fn texts_that_are_wrong_are_refused_with_the_place_and_what_to_do() {
        for (text, parts) in [
            ("", "1:1: missing field `name`"),
            ("name = \"a\"", "a network of 0 layers"),
            ("name = \"a\"\nlayers = []", "2:1: unknown field `layers`"),
            (
                "name = \"a\"\n[[layer]]\nkind = \"pool\"\ninputs = 1\noutputs = 1",
                "3:8: unknown variant `pool`",
            ),
            (
                "name = \"a\"\n[[layer]]\nkind = \"convolution\"\ninputs = -1\noutputs = 1",
                "4:10: invalid value",
            ),
            (
                "name = \"a\"\n[[layer]]\nkind = \"convolution\"\ninputs = 1\noutputs = 1\nkernel = 3",
                "has no side",
            ),
            (
                "name = \"a\"\n[[layer]]\nkind = \"fully-connected\"\ninputs = 1\noutputs = 1\nside = 3",
                "has a side",
            ),
            (
                "name = \"a\"\n[[layer]]\nkind = \"fully-connected\"\ninputs = 0\noutputs = 1",
                "has inputs = 0; give 1",
            ),
        ] {
            let error = network_from_toml(text).expect_err("wrong").to_string();
            assert!(error.contains(parts) && !error.contains('\n'), "{error:?} has no {parts:?}");
        }
        let layer = "[[layer]]\nkind = \"convolution\"\ninputs = 16777216\noutputs = 16777216\nkernel = 9\nside = 9\n";
        let large = network_from_toml(&format!("name = \"a\"\n{layer}")).expect_err("large").to_string();
        assert!(large.contains("more than 2^50 multiply-adds"), "{large}");
        let many = "[[layer]]\nkind = \"fully-connected\"\ninputs = 1\noutputs = 1\n".repeat(LAYERS_MAX + 1);
        let many = network_from_toml(&format!("name = \"a\"\n{many}")).expect_err("many").to_string();
        assert!(many.contains("a network of 4097 layers"), "{many}");
        let long = format!("name = \"{}\"", "a".repeat(FILE_BYTES_MAX));
        assert_eq!(network_from_toml(&long), Err(FileError::TooLong));
        for (text, parts) in [
            ("name = \"m\"\ntflop_per_s = nan\ngb_per_s = 1\nlatency_us = 1", "of NaN"),
            ("name = \"m\"\ntflop_per_s = \"1\"\ngb_per_s = 1\nlatency_us = 1", "2:15: invalid type"),
            ("name = \"m\"\ntflop_per_s = 1\ngb_per_s = 0\nlatency_us = 1", "bandwidth in bytes/s of 0e0"),
            ("name = \"m\"\ntflop_per_s = 1\ngb_per_s = 1", "missing field `latency_us`"),
        ] {
            let error = machine_from_toml(text).expect_err("wrong").to_string();
            assert!(error.contains(parts) && !error.contains('\n'), "{error:?} has no {parts:?}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_readers_panic(text in "(name = \"a\"\n)?([\\[\\]a-z_= \"0-9.\n-]{0,80})") {
            let _ = (network_from_toml(&text), machine_from_toml(&text));
        }
    }
}
