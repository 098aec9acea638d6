//! The taxonomy: each point of the product of its axes trains, or is refused with a reason.

use pleach_training::simulation::Settings;
use pleach_training::{Axes, Refusal, Scheme, Simulation};

use super::hybrid;
use super::model::{Linear, price, settings};

#[test]
fn each_combination_trains_or_is_refused_with_a_reason_that_names_axes() {
    let (mut trained, mut refused) = (Vec::new(), 0);
    for axes in Axes::all() {
        match Scheme::new(axes) {
            Ok(scheme) => {
                assert_eq!(scheme.axes(), axes, "{scheme}");
                trained.push(scheme.name());
                if let Scheme::Hybrid { groups } = scheme {
                    // It divides the layers of a network, on ranks of a group.
                    hybrid::expect_trained(groups, 20);
                    continue;
                }
                let settings = Settings { steps: 20, learning_rate: 0.005, ..settings(4) };
                let simulation = Simulation::new(&Linear, &scheme, &settings).expect("trains on four ranks");
                let simulated = simulation.run(&mut price, &mut |_| {});
                let simulated = simulated.unwrap_or_else(|error| panic!("{scheme}: {error}"));
                assert!(simulated.guarantee_held && simulated.parameters_equal, "{scheme}");
            }
            Err(error @ Refusal::Axes { .. }) => {
                let (message, text) = (error.to_string(), axes.to_string());
                let (_, reason) = message.split_once(": ").expect("a reason follows the axes");
                let names = text.split(' ').map(|part| part.split_once('=').expect("is KEY=VALUE"));
                let named =
                    names.filter(|(key, value)| reason.contains(key) && reason.contains(value)).count();
                assert!(message.contains(&text) && named >= 1 && reason.contains("take "), "{message}");
                refused += 1;
            }
            Err(error) => panic!("{axes}: {error}"),
        }
    }
    assert_eq!(trained.len() + refused, 3 * 2 * 3 * 3 * 5 * 3);
    // Of the 14 data parallel ones without compression three travel in two more forms; and layers
    // are divided among all ranks, or inside of groups.
    assert_eq!(trained.len(), 14 + 3 * 2 + 2, "{trained:?}");
}

#[test]
fn each_scheme_is_a_point_whose_plain_scheme_is_there_too() {
    for scheme in Scheme::ALL {
        let plain = Scheme::new(scheme.axes()).unwrap_or_else(|error| panic!("{scheme}: {error}"));
        assert_eq!(plain.axes(), scheme.axes(), "{scheme}");
    }
    let place = |text: &str| {
        let axes = text.parse::<Scheme>().expect("is a scheme").axes();
        (axes.state.name(), axes.timing.name(), axes.exchange.name(), axes.rule.name())
    };
    assert_eq!(place("dssp"), ("centralized", "bounded", "tables", "changes"));
    assert_eq!(
        place("gossip:direction=push,peer=ring"),
        ("decentralized", "synchronous", "peers", "parameters")
    );
    assert_eq!(place("bidmach:threshold=0.5"), ("decentralized", "bounded", "collective", "elastic"));
}
