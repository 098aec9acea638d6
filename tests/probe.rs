//! `pleach probe` with real processes.

#[allow(dead_code)] // Not every test looks at processes.
mod launcher;

use launcher::{finish, pleach};

#[test]
fn the_links_of_a_live_group_are_measured_and_saved_as_a_topology() {
    let file = std::env::temp_dir().join(format!("pleach-probe-{}.toml", std::process::id()));
    for (fabric, ranks) in [("shm", 3), ("tcp", 2)] {
        let mut command = pleach();
        command.args(["probe", "--fabric", fabric, "--ranks", &ranks.to_string(), "-o"]).arg(&file);
        let output = finish(command);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = std::fs::read_to_string(&file).expect("it was saved");
        for rank in 0..ranks {
            assert!(text.contains(&format!("\"r{rank}\"")), "{text}");
        }
        let numbers = |key: &str| -> Vec<f64> {
            let lines =
                text.lines().filter_map(|line| line.trim().strip_prefix(key)?.trim().strip_prefix('='));
            lines.map(|number| number.trim().parse().expect("a number")).collect()
        };
        let bandwidths = numbers("bandwidth");
        assert!(!bandwidths.is_empty() && bandwidths.len() <= ranks * (ranks - 1), "{text}");
        // In GB/s, of memory and loopback on any machine.
        assert!(bandwidths.iter().all(|gigabytes| (0.001..1000.0).contains(gigabytes)), "{text}");
        let two_digits = |number: f64| {
            let unit = 10f64.powi(number.log10().floor() as i32 - 1);
            ((number / unit).round() * unit - number).abs() < number * 1e-6
        };
        assert!(bandwidths.into_iter().all(two_digits), "{text}");
    }
    std::fs::remove_file(&file).expect("it was there");
    let mut command = pleach();
    command.args(["probe", "--ranks", "2", "-o", "/nowhere/topology.toml"]);
    let output = finish(command);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("topology not saved: /nowhere/topology.toml"), "{error}");
}
