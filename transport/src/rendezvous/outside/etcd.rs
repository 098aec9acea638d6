//! etcd, by the JSON gateway of its version 3 (etcd 3.4 and later).
//!
//! A change is a transaction: it compares the revision in which the key was created, or the value,
//! and puts the new value or reads the one that is there. Reads are linearizable, which is etcd's
//! default. Of several nodes the one that answered last is asked first. What a node says of leaders
//! and quorums is tried again until the deadline, on the other nodes too; what it says of rights
//! and room is an error at once.

use std::io;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use ureq::Agent;

use super::{
    Change, Exchanged, Lease, OutsideError, OutsideStore, Pulse, SEALED_BYTES_MAX, StorePath, path_to,
    retried,
};
use crate::Nanos;
use crate::auth::random_number;
use crate::clock::now;
use crate::rendezvous::world::Place;

const KIND: &str = "etcd";

/// How long a lease lasts after its last renewal, in seconds.
const LEASE_S: u64 = 5;

/// How often a lease is renewed.
const BEAT: Duration = Duration::from_secs(1);

/// How long one request to one node may take before another node is asked.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(2);

/// Longest answer, in bytes: a value in base64.
const ANSWER_BYTES_MAX: u64 = 2 * SEALED_BYTES_MAX as u64;

/// How many bytes of an answer that is none are shown.
const SHOWN_BYTES: usize = 48;

/// Codes of gRPC.
const NOT_FOUND: u64 = 5;
const PERMISSION_DENIED: u64 = 7;
const RESOURCE_EXHAUSTED: u64 = 8;
const UNAUTHENTICATED: u64 = 16;

/// See the module.
pub(super) struct EtcdStore {
    agent: Agent,
    places: Vec<Place>,
    /// The node that answered last.
    node: usize,
    prefix: String,
    address: String,
}

impl EtcdStore {
    pub(super) fn new(places: Vec<Place>, prefix: &str) -> Self {
        let list: Vec<String> = places.iter().map(ToString::to_string).collect();
        let address = format!("etcd://{}/{prefix}", list.join(","));
        // Neither a proxy nor another address: what is named is asked.
        let config = Agent::config_builder().http_status_as_error(false).max_redirects(0).proxy(None).build();
        Self { agent: config.into(), places, node: 0, prefix: prefix.to_owned(), address }
    }

    fn key(&self, key: &str) -> String {
        STANDARD.encode(format!("{}/{key}", self.prefix))
    }

    /// A request to any node.
    fn request(&mut self, method: &str, body: &Value, deadline: Nanos) -> Result<Value, OutsideError> {
        let body = body.to_string();
        retried(deadline, || {
            let mut last = None;
            for step in 0..self.places.len() {
                let node = (self.node + step) % self.places.len();
                match self.ask(node, method, &body, deadline) {
                    Ok(answer) => {
                        self.node = node;
                        return Ok(answer);
                    }
                    Err(error @ (OutsideError::Unreachable { .. } | OutsideError::NotReady { .. })) => {
                        last = Some(error);
                    }
                    Err(error) => return Err(error),
                }
                if now() >= deadline {
                    break;
                }
            }
            Err(last.expect("there is a node"))
        })
    }

    fn ask(&self, node: usize, method: &str, body: &str, deadline: Nanos) -> Result<Value, OutsideError> {
        let place = &self.places[node];
        let address = || format!("etcd://{place}/{}", self.prefix);
        let left = deadline.since(now()).clamp(Duration::from_millis(1), ATTEMPT_LIMIT);
        let request = self.agent.post(format!("http://{place}/v3/{method}"));
        let request = request.config().timeout_global(Some(left)).build();
        let unreachable = |error: ureq::Error| {
            let source = match error {
                ureq::Error::Io(error) => error,
                ureq::Error::Timeout(_) => io::ErrorKind::TimedOut.into(),
                error => io::Error::other(error.to_string()),
            };
            OutsideError::Unreachable { address: address(), source }
        };
        let request = request.header("content-type", "application/json");
        let mut response = request.send(body.as_bytes()).map_err(unreachable)?;
        let status = response.status().as_u16();
        let limited = response.body_mut().with_config().limit(ANSWER_BYTES_MAX);
        let answer = limited.read_to_vec().map_err(unreachable)?;
        read_answer(status, &answer, &address)
    }
}

/// The answer of a node, or what it says against the request.
fn read_answer(status: u16, answer: &[u8], address: &dyn Fn() -> String) -> Result<Value, OutsideError> {
    let foreign = || OutsideError::Foreign {
        kind: KIND,
        address: address(),
        answer: answer[..answer.len().min(SHOWN_BYTES)].to_vec(),
    };
    let value: Value = serde_json::from_slice(answer).map_err(|_| foreign())?;
    if status == 200 {
        return if value.get("header").is_some() || value.get("result").is_some() {
            Ok(value)
        } else {
            Err(foreign())
        };
    }
    let text = |name: &str| value.get(name).and_then(Value::as_str);
    let reason = text("message").or_else(|| text("error")).ok_or_else(foreign)?;
    let (address, reason): (String, String) = (address(), reason.chars().take(200).collect());
    let code = value.get("code").and_then(Value::as_u64).unwrap_or(0);
    Err(match code {
        RESOURCE_EXHAUSTED => OutsideError::Full { address, reason },
        // A lease that has run out is not found.
        NOT_FOUND | PERMISSION_DENIED | UNAUTHENTICATED => OutsideError::Refused { address, reason },
        // "user name is empty": it has users, and this is none of them.
        _ if status == 401 || status == 403 || reason.contains("user name") => {
            OutsideError::Refused { address, reason }
        }
        _ => OutsideError::NotReady { address, reason },
    })
}

/// The first value among these, in base64.
fn first_value(values: Option<&Value>) -> Result<Option<Vec<u8>>, ()> {
    let Some(found) = values.and_then(|values| values.get(0)) else { return Ok(None) };
    let text = found.get("value").and_then(Value::as_str).unwrap_or_default();
    STANDARD.decode(text).map(Some).map_err(|_| ())
}

/// Whether a transaction was made, and else the value that is there.
fn read_change(answer: &Value) -> Result<Exchanged, ()> {
    if answer.get("succeeded").and_then(Value::as_bool) == Some(true) {
        return Ok(Exchanged::Written);
    }
    let response = answer.get("responses").and_then(|responses| responses.get(0)).ok_or(())?;
    let range = response.get("response_range").ok_or(())?;
    first_value(range.get("kvs")).map(Exchanged::Present)
}

/// The number of a lease, which is text in JSON.
fn number(answer: &Value, name: &str) -> Option<u64> {
    let number = answer.get(name)?;
    number.as_str().and_then(|text| text.parse().ok()).or_else(|| number.as_u64())
}

/// See [`super::check_decoders`].
pub(super) fn check_decoders(bytes: &[u8]) {
    let address = || "etcd://a:1/b".to_owned();
    for status in [200, 400, 403, 503] {
        if let Ok(answer) = read_answer(status, bytes, &address) {
            let _ = read_change(&answer);
            let _ = first_value(answer.get("kvs"));
            let _ = number(&answer, "ID");
        }
    }
}

impl EtcdStore {
    fn foreign(&self) -> OutsideError {
        OutsideError::Foreign {
            kind: KIND,
            address: self.address.clone(),
            answer: b"JSON of another form".to_vec(),
        }
    }

    fn grant(&mut self, name: String, deadline: Nanos) -> Result<Lease, OutsideError> {
        let asked = json!({ "TTL": LEASE_S.to_string(), "ID": "0" });
        let answer = self.request("lease/grant", &asked, deadline)?;
        let number = number(&answer, "ID").ok_or_else(|| self.foreign())?;
        let lease = Lease { name, number };
        let value = random_number().to_le_bytes();
        let change = Change { expected: None, value: &value, lease: Some(&lease) };
        self.exchange(&lease.name, change, deadline)?;
        Ok(lease)
    }
}

impl OutsideStore for EtcdStore {
    fn address(&self) -> &str {
        &self.address
    }

    fn again(&self) -> Box<dyn OutsideStore> {
        Box::new(Self::new(self.places.clone(), &self.prefix))
    }

    fn exchange(
        &mut self,
        key: &str,
        change: Change<'_>,
        deadline: Nanos,
    ) -> Result<Exchanged, OutsideError> {
        let key = self.key(key);
        let compare = match change.expected {
            None => json!({ "key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0" }),
            Some(value) => {
                json!({ "key": key, "target": "VALUE", "result": "EQUAL", "value": STANDARD.encode(value) })
            }
        };
        let lease = change.lease.map_or(0, |lease| lease.number).to_string();
        let put = json!({ "key": key, "value": STANDARD.encode(change.value), "lease": lease });
        let body = json!({
            "compare": [compare],
            "success": [{ "request_put": put }],
            "failure": [{ "request_range": { "key": key } }],
        });
        let answer = self.request("kv/txn", &body, deadline)?;
        let found = read_change(&answer).map_err(|()| self.foreign())?;
        // An attempt before this one may have written it, whose answer was lost.
        let is_own = matches!(&found, Exchanged::Present(Some(value)) if value == change.value);
        Ok(if is_own { Exchanged::Written } else { found })
    }

    fn read(&mut self, key: &str, deadline: Nanos) -> Result<Option<Vec<u8>>, OutsideError> {
        let answer = self.request("kv/range", &json!({ "key": self.key(key) }), deadline)?;
        first_value(answer.get("kvs")).map_err(|()| self.foreign())
    }

    fn lease(&mut self, name: &str, deadline: Nanos) -> Result<Lease, OutsideError> {
        self.grant(format!("lease-{name}"), deadline)
    }

    fn presence(&mut self, deadline: Nanos) -> Result<Lease, OutsideError> {
        self.grant(format!("member-{:016x}", random_number()), deadline)
    }

    fn beat(&self) -> Duration {
        BEAT
    }

    fn renew(&mut self, lease: &Lease, deadline: Nanos) -> Result<bool, OutsideError> {
        let answer = self.request("lease/keepalive", &json!({ "ID": lease.number.to_string() }), deadline)?;
        let answer = answer.get("result").unwrap_or(&answer);
        // Of one that has run out no time is left, and nothing is said.
        Ok(number(answer, "TTL").is_some_and(|left| left > 0))
    }

    fn revoke(&mut self, lease: &Lease, deadline: Nanos) {
        let _ = self.request("lease/revoke", &json!({ "ID": lease.number.to_string() }), deadline);
    }

    fn is_alive(
        &mut self,
        lease: &Lease,
        _pulse: &mut Pulse,
        deadline: Nanos,
    ) -> Result<Option<bool>, OutsideError> {
        self.read(&lease.name, deadline).map(|value| Some(value.is_some()))
    }

    fn is_inhabited(&mut self, deadline: Nanos) -> Result<bool, OutsideError> {
        // From "member-" to the first name after all that begin so.
        let range = json!({ "key": self.key("member-"), "range_end": self.key("member."), "limit": "1" });
        let answer = self.request("kv/range", &range, deadline)?;
        first_value(answer.get("kvs")).map(|value| value.is_some()).map_err(|()| self.foreign())
    }

    fn path(&self) -> Option<StorePath> {
        path_to(&self.places[self.node])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_node_says_against_a_request_is_told_apart() {
        let address = || "etcd://a:1/b".to_owned();
        let read = |status: u16, text: &str| read_answer(status, text.as_bytes(), &address);
        let full = r#"{"error":"etcdserver: mvcc: database space exceeded","code":8,"message":"etcdserver: mvcc: database space exceeded"}"#;
        assert!(matches!(read(429, full), Err(OutsideError::Full { .. })));
        let denied = r#"{"error":"etcdserver: permission denied","code":7}"#;
        assert!(matches!(read(403, denied), Err(OutsideError::Refused { .. })));
        let nobody = r#"{"error":"etcdserver: user name is empty","code":3}"#;
        assert!(matches!(read(400, nobody), Err(OutsideError::Refused { .. })));
        let headless = r#"{"error":"etcdserver: no leader","code":14}"#;
        assert!(matches!(read(503, headless), Err(OutsideError::NotReady { .. })));
        for (status, text) in [(404, "404 page not found"), (200, "<html>"), (200, "[1]"), (500, "{}")] {
            assert!(matches!(read(status, text), Err(OutsideError::Foreign { .. })), "{text}");
        }
    }

    #[test]
    fn a_change_is_made_or_says_which_value_is_there() {
        let read = |text: &str| read_change(&serde_json::from_str(text).expect("JSON"));
        assert_eq!(read(r#"{"header":{},"succeeded":true,"responses":[{}]}"#), Ok(Exchanged::Written));
        let present = r#"{"responses":[{"response_range":{"kvs":[{"value":"Zm9v"}],"count":"1"}}]}"#;
        assert_eq!(read(present), Ok(Exchanged::Present(Some(b"foo".to_vec()))));
        assert_eq!(read(r#"{"responses":[{"response_range":{}}]}"#), Ok(Exchanged::Present(None)));
        assert_eq!(read(r#"{"header":{}}"#), Err(()));
    }
}
