BEGIN TRANSACTION;
CREATE TABLE attempts (
        seq INTEGER NOT NULL,
        attempt INTEGER NOT NULL,
        kind TEXT NOT NULL,
        stage TEXT NOT NULL,
        message TEXT NOT NULL,
        sampled_tokens INTEGER NOT NULL,
        seconds REAL NOT NULL,
        evidence TEXT,                      -- of errors.Evidence, where that decides about the next attempt
        PRIMARY KEY (seq, attempt)
    ) STRICT, WITHOUT ROWID;
INSERT INTO "attempts" VALUES(2,0,'sandbox_lost','run','scripted sandbox_lost.
Nothing to do: this is a test.',3,1.2001699997199466452e-04,NULL);
CREATE TABLE bodies (seq INTEGER PRIMARY KEY, body TEXT NOT NULL) STRICT;
INSERT INTO "bodies" VALUES(1,'{"environment":"scripted","rollout_id":"finished","task":{}}');
INSERT INTO "bodies" VALUES(2,'{"environment":"scripted","rollout_id":"lost-once","task":{"flaky":1,"id":"lost-once","run":"sandbox_lost"}}');
INSERT INTO "bodies" VALUES(3,'{"environment":"scripted","rollout_id":"cancelled","task":{"run":"hang"}}');
INSERT INTO "bodies" VALUES(4,'{"environment":"scripted","group_id":"g","group_size":2,"rollout_id":"g0","task":{}}');
INSERT INTO "bodies" VALUES(5,'{"environment":"scripted","group_id":"g","group_size":2,"replica":1,"rollout_id":"g1","task":{}}');
INSERT INTO "bodies" VALUES(6,'{"environment":"scripted","metadata":{"step":"3"},"rollout_id":"of-a-run","run_id":"run","task":{}}');
INSERT INTO "bodies" VALUES(7,'{"environment":"scripted","rollout_id":"pending","task":{"run":"hang"}}');
CREATE TABLE demands (run_id TEXT PRIMARY KEY, demand TEXT NOT NULL, set_at REAL NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "demands" VALUES('run','{"groups":1,"after":0,"spare":0,"version":null,"pool":"policy","max_staleness":null,"redundant":{"init":"kill","run":"park","park_seconds":600.0},"replace":2,"extra":0,"straggler_factor":3.0,"straggler_seconds":30.0,"epsilon":1e-6}',1.79552772742875576018e+09);
CREATE TABLE marks (
        epoch INTEGER NOT NULL,
        last_cursor INTEGER NOT NULL,
        commits INTEGER NOT NULL DEFAULT 0,
        home TEXT,
        boot TEXT,
        uptime REAL,
        clock REAL
    ) STRICT;
INSERT INTO "marks" VALUES(0,0,11,'/tmp/tmpkknuu39n/ledger.sqlite3','6edd788e-54e3-4116-94fa-5b240c0a6162',2360.93,1.79552772740875577926e+09);
CREATE TABLE outcomes (
        cursor INTEGER PRIMARY KEY,
        seq INTEGER NOT NULL,
        run_id TEXT NOT NULL,
        group_id TEXT,
        status TEXT NOT NULL,
        detail TEXT NOT NULL,
        cause TEXT,
        reward REAL,
        masked INTEGER NOT NULL,
        oldest_version INTEGER,
        turns INTEGER NOT NULL,
        sampled_tokens INTEGER NOT NULL,
        finished_at REAL NOT NULL,
        released_at REAL,                   -- by the ledger's clock; NULL: the record is kept
        written_at REAL NOT NULL DEFAULT 0  -- by the ledger's clock
    ) STRICT;
INSERT INTO "outcomes" VALUES(1,1,'default',NULL,'completed','',NULL,1.0,0,0,1,3,1.79552772742347049707e+09,NULL,1.7955277274387557506e+09);
INSERT INTO "outcomes" VALUES(2,4,'default','g','completed','',NULL,1.0,0,0,1,3,1.79552772742414617533e+09,NULL,1.7955277274387557506e+09);
INSERT INTO "outcomes" VALUES(3,5,'default','g','completed','',NULL,1.0,0,0,1,3,1.79552772742425918576e+09,NULL,1.7955277274387557506e+09);
INSERT INTO "outcomes" VALUES(4,6,'run',NULL,'completed','',NULL,1.0,0,0,1,3,1.79552772742434382435e+09,NULL,1.7955277274387557506e+09);
INSERT INTO "outcomes" VALUES(5,3,'default',NULL,'cancelled','client',NULL,NULL,1,0,1,3,1.79552772745073246953e+09,NULL,1.79552772744875574115e+09);
INSERT INTO "outcomes" VALUES(6,2,'default',NULL,'completed','',NULL,1.0,0,0,1,3,1.79552772745510697363e+09,NULL,1.79552772745875573157e+09);
CREATE TABLE records (cursor INTEGER PRIMARY KEY, record TEXT NOT NULL, crc INTEGER) STRICT;
INSERT INTO "records" VALUES(1,'{"schema_version":1,"rollout_id":"finished","attempt":0,"run_id":"default","group_id":null,"group_size":1,"replica":0,"environment":"scripted","evaluation":false,"metadata":{},"stands_in_for":null,"outcome":{"status":"completed","limit":null,"kind":null,"reason":null,"stage":null,"message":"","evidence":null},"score":{"reward":1.0,"components":{},"detail":{}},"segments":[{"token_ids":[1,2,3,4],"mask":[0,1,1,1],"logprobs":[0.0,-0.5,-0.5,-0.5],"policy_versions":[-1,0,0,0],"generations":[{"start":1,"end":4,"turn":0,"finish_reason":"stop","engine":"fake","seconds":0.0,"cached_tokens":null,"seed":null,"routed_experts":null}],"temperature":1.0,"top_p":1.0,"top_k":-1,"logprob_kind":"raw","parent":null,"shared_tokens":0,"cause":"first","rewrites":[],"trained":true}],"messages":[{"role":"user","content":"go","tool_calls":[],"tool_call_id":null,"name":null},{"role":"assistant","content":"done","tool_calls":[],"tool_call_id":null,"name":null}],"prompt_messages":1,"tools":[],"settings":{"temperature":1.0,"top_p":1.0,"top_k":-1,"seed":null,"stop_token_ids":[],"max_turns":16,"max_tokens":32768,"max_turn_tokens":4096,"init_seconds":120.0,"run_seconds":1800.0,"eval_seconds":300.0,"action_seconds":30.0,"resume":false,"mask_overlong":[],"trained_segments":"all"},"stages":{"init":{"queued":0.00011249699991822126,"seconds":0.000056072999996104045},"run":{"queued":0.000028512999961094465,"seconds":0.00005571200017584488},"eval":{"queued":8.79300023370888e-6,"seconds":0.00003654400006780634}},"retries":[],"resumed_turns":0,"resume_refused":"","cancel_seconds":null,"accepted_at":1795527727.4187214,"finished_at":1795527727.4234705}',1026946751);
INSERT INTO "records" VALUES(2,'{"schema_version":1,"rollout_id":"g0","attempt":0,"run_id":"default","group_id":"g","group_size":2,"replica":0,"environment":"scripted","evaluation":false,"metadata":{},"stands_in_for":null,"outcome":{"status":"completed","limit":null,"kind":null,"reason":null,"stage":null,"message":"","evidence":null},"score":{"reward":1.0,"components":{},"detail":{}},"segments":[{"token_ids":[1,2,3,4],"mask":[0,1,1,1],"logprobs":[0.0,-0.5,-0.5,-0.5],"policy_versions":[-1,0,0,0],"generations":[{"start":1,"end":4,"turn":0,"finish_reason":"stop","engine":"fake","seconds":0.0,"cached_tokens":null,"seed":null,"routed_experts":null}],"temperature":1.0,"top_p":1.0,"top_k":-1,"logprob_kind":"raw","parent":null,"shared_tokens":0,"cause":"first","rewrites":[],"trained":true}],"messages":[{"role":"user","content":"go","tool_calls":[],"tool_call_id":null,"name":null},{"role":"assistant","content":"done","tool_calls":[],"tool_call_id":null,"name":null}],"prompt_messages":1,"tools":[],"settings":{"temperature":1.0,"top_p":1.0,"top_k":-1,"seed":null,"stop_token_ids":[],"max_turns":16,"max_tokens":32768,"max_turn_tokens":4096,"init_seconds":120.0,"run_seconds":1800.0,"eval_seconds":300.0,"action_seconds":30.0,"resume":false,"mask_overlong":[],"trained_segments":"all"},"stages":{"init":{"queued":0.000037164999866945436,"seconds":0.00002185299990742351},"run":{"queued":0.000011046000054193428,"seconds":0.000032578000173089094},"eval":{"queued":6.299999768089037e-6,"seconds":0.000025887999981932808}},"retries":[],"resumed_turns":0,"resume_refused":"","cancel_seconds":null,"accepted_at":1795527727.4187214,"finished_at":1795527727.4241462}',1155215160);
INSERT INTO "records" VALUES(3,'{"schema_version":1,"rollout_id":"g1","attempt":0,"run_id":"default","group_id":"g","group_size":2,"replica":1,"environment":"scripted","evaluation":false,"metadata":{},"stands_in_for":null,"outcome":{"status":"completed","limit":null,"kind":null,"reason":null,"stage":null,"message":"","evidence":null},"score":{"reward":1.0,"components":{},"detail":{}},"segments":[{"token_ids":[1,2,3,4],"mask":[0,1,1,1],"logprobs":[0.0,-0.5,-0.5,-0.5],"policy_versions":[-1,0,0,0],"generations":[{"start":1,"end":4,"turn":0,"finish_reason":"stop","engine":"fake","seconds":0.0,"cached_tokens":null,"seed":null,"routed_experts":null}],"temperature":1.0,"top_p":1.0,"top_k":-1,"logprob_kind":"raw","parent":null,"shared_tokens":0,"cause":"first","rewrites":[],"trained":true}],"messages":[{"role":"user","content":"go","tool_calls":[],"tool_call_id":null,"name":null},{"role":"assistant","content":"done","tool_calls":[],"tool_call_id":null,"name":null}],"prompt_messages":1,"tools":[],"settings":{"temperature":1.0,"top_p":1.0,"top_k":-1,"seed":null,"stop_token_ids":[],"max_turns":16,"max_tokens":32768,"max_turn_tokens":4096,"init_seconds":120.0,"run_seconds":1800.0,"eval_seconds":300.0,"action_seconds":30.0,"resume":false,"mask_overlong":[],"trained_segments":"all"},"stages":{"init":{"queued":0.00003369000023667468,"seconds":0.00002041000016106409},"run":{"queued":0.000012028000128339045,"seconds":0.000028791999739041785},"eval":{"queued":5.408000106399413e-6,"seconds":0.000023755000256642234}},"retries":[],"resumed_turns":0,"resume_refused":"","cancel_seconds":null,"accepted_at":1795527727.4187214,"finished_at":1795527727.4242592}',699005479);
INSERT INTO "records" VALUES(4,'{"schema_version":1,"rollout_id":"of-a-run","attempt":0,"run_id":"run","group_id":null,"group_size":1,"replica":0,"environment":"scripted","evaluation":false,"metadata":{"step":"3"},"stands_in_for":null,"outcome":{"status":"completed","limit":null,"kind":null,"reason":null,"stage":null,"message":"","evidence":null},"score":{"reward":1.0,"components":{},"detail":{}},"segments":[{"token_ids":[1,2,3,4],"mask":[0,1,1,1],"logprobs":[0.0,-0.5,-0.5,-0.5],"policy_versions":[-1,0,0,0],"generations":[{"start":1,"end":4,"turn":0,"finish_reason":"stop","engine":"fake","seconds":0.0,"cached_tokens":null,"seed":null,"routed_experts":null}],"temperature":1.0,"top_p":1.0,"top_k":-1,"logprob_kind":"raw","parent":null,"shared_tokens":0,"cause":"first","rewrites":[],"trained":true}],"messages":[{"role":"user","content":"go","tool_calls":[],"tool_call_id":null,"name":null},{"role":"assistant","content":"done","tool_calls":[],"tool_call_id":null,"name":null}],"prompt_messages":1,"tools":[],"settings":{"temperature":1.0,"top_p":1.0,"top_k":-1,"seed":null,"stop_token_ids":[],"max_turns":16,"max_tokens":32768,"max_turn_tokens":4096,"init_seconds":120.0,"run_seconds":1800.0,"eval_seconds":300.0,"action_seconds":30.0,"resume":false,"mask_overlong":[],"trained_segments":"all"},"stages":{"init":{"queued":0.00004478599976209807,"seconds":0.000027100999886897625},"run":{"queued":0.00001226800031872699,"seconds":0.00003089599977101898},"eval":{"queued":5.438000243884744e-6,"seconds":0.00002391599991824478}},"retries":[],"resumed_turns":0,"resume_refused":"","cancel_seconds":null,"accepted_at":1795527727.4187214,"finished_at":1795527727.4243438}',2532585999);
INSERT INTO "records" VALUES(5,'{"schema_version":1,"rollout_id":"cancelled","attempt":0,"run_id":"default","group_id":null,"group_size":1,"replica":0,"environment":"scripted","evaluation":false,"metadata":{},"stands_in_for":null,"outcome":{"status":"cancelled","limit":null,"kind":null,"reason":"client","stage":"run","message":"","evidence":null},"score":null,"segments":[{"token_ids":[1,2,3,4],"mask":[0,1,1,1],"logprobs":[0.0,-0.5,-0.5,-0.5],"policy_versions":[-1,0,0,0],"generations":[{"start":1,"end":4,"turn":0,"finish_reason":"stop","engine":"fake","seconds":0.0,"cached_tokens":null,"seed":null,"routed_experts":null}],"temperature":1.0,"top_p":1.0,"top_k":-1,"logprob_kind":"raw","parent":null,"shared_tokens":0,"cause":"first","rewrites":[],"trained":true}],"messages":[{"role":"user","content":"go","tool_calls":[],"tool_call_id":null,"name":null},{"role":"assistant","content":"done","tool_calls":[],"tool_call_id":null,"name":null}],"prompt_messages":1,"tools":[],"settings":{"temperature":1.0,"top_p":1.0,"top_k":-1,"seed":null,"stop_token_ids":[],"max_turns":16,"max_tokens":32768,"max_turn_tokens":4096,"init_seconds":120.0,"run_seconds":1800.0,"eval_seconds":300.0,"action_seconds":30.0,"resume":false,"mask_overlong":[],"trained_segments":"all"},"stages":{"init":{"queued":0.00004358399974080385,"seconds":0.000025819000256888103},"run":{"queued":0.000011907000043720473,"seconds":0.02758376700012377}},"retries":[],"resumed_turns":0,"resume_refused":"","cancel_seconds":0.0003648400002020935,"accepted_at":1795527727.4187214,"finished_at":1795527727.4507325}',804624021);
INSERT INTO "records" VALUES(6,'{"schema_version":1,"rollout_id":"lost-once","attempt":1,"run_id":"default","group_id":null,"group_size":1,"replica":0,"environment":"scripted","evaluation":false,"metadata":{},"stands_in_for":null,"outcome":{"status":"completed","limit":null,"kind":null,"reason":null,"stage":null,"message":"","evidence":null},"score":{"reward":1.0,"components":{},"detail":{}},"segments":[{"token_ids":[1,2,3,4],"mask":[0,1,1,1],"logprobs":[0.0,-0.5,-0.5,-0.5],"policy_versions":[-1,0,0,0],"generations":[{"start":1,"end":4,"turn":0,"finish_reason":"stop","engine":"fake","seconds":0.0,"cached_tokens":null,"seed":null,"routed_experts":null}],"temperature":1.0,"top_p":1.0,"top_k":-1,"logprob_kind":"raw","parent":null,"shared_tokens":0,"cause":"first","rewrites":[],"trained":true}],"messages":[{"role":"user","content":"go","tool_calls":[],"tool_call_id":null,"name":null},{"role":"assistant","content":"done","tool_calls":[],"tool_call_id":null,"name":null}],"prompt_messages":1,"tools":[],"settings":{"temperature":1.0,"top_p":1.0,"top_k":-1,"seed":null,"stop_token_ids":[],"max_turns":16,"max_tokens":32768,"max_turn_tokens":4096,"init_seconds":120.0,"run_seconds":1800.0,"eval_seconds":300.0,"action_seconds":30.0,"resume":false,"mask_overlong":[],"trained_segments":"all"},"stages":{"init":{"queued":0.00011220600026717875,"seconds":0.000057795999964582734},"run":{"queued":0.00002900300023611635,"seconds":0.00008667799966133316},"eval":{"queued":0.000011826999980257824,"seconds":0.00004268299971954548}},"retries":[{"attempt":0,"kind":"sandbox_lost","stage":"run","message":"scripted sandbox_lost.\nNothing to do: this is a test.","sampled_tokens":3,"seconds":0.00012001699997199466,"evidence":null}],"resumed_turns":0,"resume_refused":"","cancel_seconds":null,"accepted_at":1795527727.4187214,"finished_at":1795527727.455107}',1556358192);
CREATE TABLE rollouts (
        seq INTEGER PRIMARY KEY,
        rollout_id TEXT NOT NULL UNIQUE,
        run_id TEXT NOT NULL,
        group_id TEXT,
        group_size INTEGER NOT NULL,
        replica INTEGER NOT NULL,
        environment TEXT NOT NULL,
        evaluation INTEGER NOT NULL,
        stands_in_for TEXT,
        accepted_at REAL NOT NULL,
        body_hash TEXT NOT NULL,
        attempt INTEGER NOT NULL DEFAULT 0, -- the next one's number
        begun INTEGER,                      -- the number of the one that runs
        cancel TEXT,
        cursor INTEGER                      -- of its outcome; NULL: pending
    ) STRICT;
INSERT INTO "rollouts" VALUES(1,'finished','default',NULL,1,0,'scripted',0,NULL,1.79552772741872143742e+09,'1933f8f62985ee1b5c4e8498e87d04d02150cab402dc6798d6e4f9b5f13e5c1d',1,0,NULL,1);
INSERT INTO "rollouts" VALUES(2,'lost-once','default',NULL,1,0,'scripted',0,NULL,1.79552772741872143742e+09,'4a9dbee5534d8243cd2c5acef228eb086f1b8dd97411b09d3eb196315ba6776d',2,1,NULL,6);
INSERT INTO "rollouts" VALUES(3,'cancelled','default',NULL,1,0,'scripted',0,NULL,1.79552772741872143742e+09,'ed69d1ceb500b00b205eb1f115edc625df28e23824279f1ae79cec879762b99b',1,0,'client',5);
INSERT INTO "rollouts" VALUES(4,'g0','default','g',2,0,'scripted',0,NULL,1.79552772741872143742e+09,'83c8414cede310fd42c07f81acf33e2c6e7afaf88d7bf4426ddff9f2efb48f40',1,0,NULL,2);
INSERT INTO "rollouts" VALUES(5,'g1','default','g',2,1,'scripted',0,NULL,1.79552772741872143742e+09,'7afd9ef70a082ea51f8f6efa5436899d2fd3fae0c9446e0c570331136dab0d48',1,0,NULL,3);
INSERT INTO "rollouts" VALUES(6,'of-a-run','run',NULL,1,0,'scripted',0,NULL,1.79552772741872143742e+09,'5c1af116949bbf889fc42ae4ad71213c1958429264891741c9389791f84ccaec',1,0,NULL,4);
INSERT INTO "rollouts" VALUES(7,'pending','default',NULL,1,0,'scripted',0,NULL,1.79552772746265196799e+09,'3ddd8e94bf90e659f0fdee13066fc8a657933ee60ac93a40b6ab18b737a3dadb',1,NULL,NULL,NULL);
CREATE TABLE schema_version (version INTEGER NOT NULL) STRICT;
INSERT INTO "schema_version" VALUES(5);
CREATE TABLE turns (
        seq INTEGER NOT NULL,
        number INTEGER NOT NULL,            -- from 0, without gaps
        attempt INTEGER NOT NULL,           -- that sampled it
        body BLOB NOT NULL,                 -- compressed JSON
        PRIMARY KEY (seq, number)
    ) STRICT;
CREATE TABLE versions (pool TEXT PRIMARY KEY, version INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE INDEX pending ON rollouts (seq) WHERE cursor IS NULL;
CREATE INDEX of_run ON outcomes (run_id, cursor, released_at);
CREATE INDEX of_group ON outcomes (group_id, cursor) WHERE group_id IS NOT NULL;
CREATE INDEX kept ON outcomes (written_at) WHERE released_at IS NULL;
CREATE INDEX released ON outcomes (released_at) WHERE released_at IS NOT NULL;
COMMIT;
